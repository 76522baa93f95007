"""The experts of a mixture with quantized weights: `patch_model(model, weights="int8" | "int4")`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._core.devices import on_cpu
from ...weights import FORMATS, BlockFormat, Format, Integers, best, experts_out_of_panels
from ..checks.conditions import dense_last
from ..swap import PLAN, Unsupported, restore, swap
from .experts import Experts, ExpertsPlan, biases_of, fused_experts, sizes, weights_of
from .quantized import Quantized, all_finite, nth, shown

DENSE = "_infini_dense"  # attribute during the original's forward: the dequantized weights, by name


class QuantizedExpertsPlan(NamedTuple):
    """How the weights are stored, and what Experts has found about the module.

    Attributes:
        format: Of the weight of the first product.
        down: The format of the second's; empty: the same.
    """

    format: str
    group: int
    dtype: torch.dtype
    experts: ExpertsPlan
    down: str = ""

    def format_of(self, name: str) -> Format:
        """Return the format of a weight."""
        return FORMATS[self.down if self.down and name == "down_proj" else self.format]


def integers_name(name: str) -> str:
    return f"{name}_integers"


def scales_name(name: str) -> str:
    return f"{name}_scales"


class QuantizedExperts(Quantized, Experts):
    """Experts whose weights are in panels, or in blocks of a checkpoint; the original's names give dequantized weights.

    Rows are quantized, and stored, as the products take them, however the original's weights are laid out.
    """

    on_cuda = False

    @property
    def freed(self) -> tuple[str, ...]:
        return weights_of(self)

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(map(scales_name, weights_of(self)))

    @classmethod
    def plans(cls, module: nn.Module, format: str = "int8") -> Sequence[Any]:
        if not isinstance(module, Experts):
            raise Unsupported("its experts are not computed by fused_experts")
        weights = [module.get_parameter(name) for name in weights_of(module)]
        if not all(map(on_cpu, weights)):
            raise Unsupported("quantized experts run on the CPU alone")
        kind = best(format, weights[0].device)
        if not kind.serves_experts:
            able = ", ".join(sorted(one.name for one in FORMATS.values() if one.serves_experts))
            raise Unsupported(f"experts can have the formats {able}, not {kind.name}")
        if not all(map(all_finite, weights)):
            raise Unsupported("its weights contain infinity or NaN, which cannot be quantized")
        return [QuantizedExpertsPlan(kind.name, 0, weights[0].dtype, vars(module)[PLAN])]

    @property
    def experts_plan(self) -> ExpertsPlan:
        plan: QuantizedExpertsPlan = vars(self)[PLAN]
        return plan.experts

    @property
    def gate_up_proj(self) -> Tensor:
        """The dequantized weights in the module's dtype, as the original stores them: a new tensor at each access."""
        return self.dequantized("gate_up_proj")

    @property
    def up_proj(self) -> Tensor:
        """The dequantized weights of experts without gate, likewise."""
        return self.dequantized("up_proj")

    @property
    def down_proj(self) -> Tensor:
        """The dequantized weights, likewise."""
        return self.dequantized("down_proj")

    def dequantized(self, name: str) -> Tensor:
        if name not in weights_of(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        dense: dict[str, Tensor] = vars(self).get(DENSE, {})
        if name in dense:
            return dense[name]
        plan: QuantizedExpertsPlan = vars(self)[PLAN]
        integers = Integers(self._buffers[integers_name(name)], self._buffers.get(scales_name(name)))
        experts, hidden, inner = self.sizes
        n, k = self.rows_of(name), inner if name == "down_proj" else hidden
        weights = torch.empty(experts, n, k, dtype=plan.dtype, device=integers.weight.device)
        for e in range(experts):
            weights[e] = plan.format_of(name).dequantize(nth(integers, e), 0, n, k, plan.dtype)
        return shown(self.as_stored(weights))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of experts, of columns of x, and of columns inside."""
        first, down = weights_of(self)
        inner = self.rows_of(first) // (2 if self.experts_plan.has_gate else 1)
        return len(self._buffers[integers_name(down)]), self.rows_of(down), inner

    def rows_of(self, name: str) -> int:
        """Return the rows of an expert's weight: scales have them, and blocks, or their panels."""
        scales = self._buffers.get(scales_name(name))
        if scales is not None:
            return scales.shape[1]
        plan: QuantizedExpertsPlan = vars(self)[PLAN]
        return self._buffers[integers_name(name)].shape[1] * plan.format_of(name).panel

    @property
    def weight_count(self) -> int:
        experts, hidden, inner = self.sizes
        return (3 if self.experts_plan.has_gate else 2) * experts * hidden * inner

    @property
    def is_savable(self) -> bool:
        return scales_name("down_proj") in self._buffers  # blocks stay in the checkpoint that has them

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        plan: QuantizedExpertsPlan = vars(self)[PLAN]
        if fn(torch.empty(0, dtype=plan.dtype)).dtype != plan.dtype:
            self.out_of_panels()
        return super()._apply(fn, recurse)

    def out_of_panels(self) -> None:
        """Store blocks in rows, which serve every dtype alike."""
        plan: QuantizedExpertsPlan = vars(self)[PLAN]
        formats = []
        for name in weights_of(self):
            weights = self._buffers[integers_name(name)]
            format, self._buffers[integers_name(name)] = experts_out_of_panels(plan.format_of(name).name, weights)
            formats.append(format)
        vars(self)[PLAN] = plan._replace(format=formats[0], down=plan.down and formats[1])

    def forward_of_original(self, *args: Any, **kwargs: Any) -> Tensor:
        # It may take an expert at a time from the weights: they are dequantized once.
        vars(self)[DENSE] = {name: self.dequantized(name) for name in weights_of(self)}
        try:
            return super().forward_of_original(*args, **kwargs)
        finally:
            vars(self).pop(DENSE, None)

    def product(self, x: Tensor, index: Tensor, weights: Tensor, weights_on_input: bool = False) -> Tensor:
        buffers, plan, names = self._buffers, self.experts_plan, weights_of(self)
        return fused_experts(
            dense_last(x),
            *(buffers[integers_name(name)] for name in names),
            index,
            weights,
            plan.activation,
            *(buffers.get(scales_name(name)) for name in names),
            *(self._parameters.get(name) for name in biases_of(self)),
            plan.interleaved,
            plan.alpha,
            plan.limit,
            *self.kinds,
            weights_on_input,
            *self.share,
        )

    @property
    def kinds(self) -> tuple[int, int]:
        """The kind of block of each weight, as the op takes it; -1 for weights in panels."""
        storage: QuantizedExpertsPlan = vars(self)[PLAN]
        first, down = (
            format.kind.number if isinstance(format, BlockFormat) else -1
            for format in map(storage.format_of, weights_of(self))
        )
        return first, down

    def extra_repr(self) -> str:
        experts, hidden, inner = self.sizes
        names = dict.fromkeys(vars(self)[PLAN].format_of(name).name for name in weights_of(self))
        return f"experts={experts}, hidden={hidden}, inner={inner}, {' and '.join(names)}"


def quantize_experts(module: nn.Module, format: str) -> None:
    """Quantize the weights of patched experts, and free them one after the other."""
    plan: QuantizedExpertsPlan = QuantizedExperts.plans(module, format)[0]
    assert isinstance(module, Experts)
    kind = FORMATS[plan.format]
    buffers: dict[str, Tensor] = {}
    for name in weights_of(module):
        weights = module.rows(name)
        experts, n, k = weights.shape
        kinds = kind.kinds(n, k, plan.group, plan.dtype)
        new = {field: torch.zeros(experts, *spec.shape, dtype=spec.dtype) for field, spec in kinds.items()}
        integers = Integers(**new)
        for e in range(experts):
            kind.quantize(weights[e].contiguous(), nth(integers, e))
        buffers[integers_name(name)], buffers[scales_name(name)] = new["weight"], new["scales"]
    restore(module)
    install(module, plan, buffers)


def empty_buffers(module: nn.Module, plan: QuantizedExpertsPlan) -> dict[str, Tensor]:
    """Return the buffers of quantized experts on the meta device, to be loaded later."""
    experts, hidden, inner = sizes(module)
    buffers = {}
    first, second = weights_of(module)
    rows = 2 * inner if plan.experts.has_gate else inner
    for name, n, k in ((first, rows, hidden), (second, hidden, inner)):
        kinds = FORMATS[plan.format].kinds(n, k, plan.group, plan.dtype)
        empty = {
            field: torch.empty(experts, *spec.shape, dtype=spec.dtype, device="meta") for field, spec in kinds.items()
        }
        buffers[integers_name(name)], buffers[scales_name(name)] = empty["weight"], empty["scales"]
    return buffers


def install(module: nn.Module, plan: QuantizedExpertsPlan, buffers: dict[str, Tensor]) -> None:
    """Turn experts into quantized ones with these buffers, and free their weights; each step leaves a whole module."""
    for name, value in buffers.items():
        module.register_buffer(name, value)
    names = weights_of(module)
    swap(module, QuantizedExperts, plan)
    for name in names:
        del module._parameters[name]
