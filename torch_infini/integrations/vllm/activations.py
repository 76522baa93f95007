"""vLLM's custom ops SiluAndMul, GeluAndMul and rotary embedding by torch_infini's ops.

A class here replaces the one of vLLM that it inherits from. Its forward is used whether or not the custom op is
enabled in vLLM's compilation_config, because our kernel serves both ways.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from .activation import Activation

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class InfiniOp:
    """Makes forward_infini the forward of a custom op, instead of forward_native or forward_cpu."""

    forward_infini: Any

    def dispatch_forward(self, compile_native: bool) -> Any:
        super().dispatch_forward(compile_native=False)  # type: ignore[misc]  # records the op as enabled or not
        return self.forward_infini


class InfiniSiluAndMul(InfiniOp, SiluAndMul):  # type: ignore[misc]  # vLLM is untyped here
    """silu(gate) * up of x [..., 2 d]."""

    def forward_infini(self, x: Tensor) -> Tensor:
        """Return [..., d]."""
        if x.dtype not in DTYPES:
            return self.forward_native(x)
        if torch.compiler.is_compiling():
            return torch.ops.infini.swiglu.default(x)
        gate, up = x.chunk(2, dim=-1)
        return torch.ops.infini.mul.default(torch.ops.infini.silu.default(gate), up)


class InfiniGeluAndMul(InfiniOp, GeluAndMul):  # type: ignore[misc]
    """gelu(gate) * up of x [..., 2 d]; the exact one is left to Inductor, for there is no op that rounds it once."""

    def forward_infini(self, x: Tensor) -> Tensor:
        """Return [..., d]."""
        compiling = torch.compiler.is_compiling()
        if x.dtype not in DTYPES or (compiling and self.approximate == "none"):
            return self.forward_native(x)
        if self.approximate == "tanh":
            return torch.ops.infini.geglu.default(x)
        gate, up = x.chunk(2, dim=-1)
        return torch.ops.infini.mul.default(torch.ops.infini.gelu.default(gate), up)


class InfiniRotary(InfiniOp):
    """The rotation of query and key [tokens, heads * head_size] by vLLM's joint table of cosines and sines."""

    def forward_infini(
        self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return query and key, rotated; their first rotary_dim columns of each head."""
        if query.dtype not in DTYPES or positions.dim() != 1:
            return self.forward_native(positions, query, key)
        cos, sin = self._match_cos_sin_cache_dtype(query).chunk(2, dim=-1)

        def rotated(x: Tensor) -> Tensor:
            heads = x.view(len(positions), -1, self.head_size)
            y = torch.ops.infini.rope.default(heads, cos, sin, positions, not self.is_neox_style)
            return y.view(x.shape)

        return rotated(query), None if key is None else rotated(key)


def install_custom_ops(activation: Activation) -> None:
    """Register the classes above for vLLM's, and one for each kind of rotary embedding that differs in its table."""
    ours: dict[str, Any] = {"SiluAndMul": InfiniSiluAndMul, "GeluAndMul": InfiniGeluAndMul}
    for name, kind in sorted(vars(rotary_embedding).items()):
        if not (isinstance(kind, type) and issubclass(kind, RotaryEmbedding)):
            continue
        methods = ("forward_native", "forward_cpu", "forward_static", "_match_cos_sin_cache_dtype")
        changed = [method for method in methods if getattr(kind, method) is not getattr(RotaryEmbedding, method)]
        if changed:
            activation.leave(name, f"it has a {changed[0]} of its own")
        else:
            ours[name] = type(f"Infini{name}", (InfiniRotary, kind), {"__doc__": kind.__doc__})
    for name, kind in ours.items():
        if name in op_registry_oot:
            activation.leave(name, f"another plugin replaces it by {op_registry_oot[name].__name__}")
            continue
        key = getattr(kind, "name", name)
        CustomOp.register_oot(kind, name=name)
        kind.name = key  # register_oot renames it; compilation_config knows it by this one
        activation.replaced.append(name)
