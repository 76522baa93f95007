"""What the plugin would replace in a model, and why not the rest: python -m torch_infini vllm MODEL.

The model is made as vLLM makes it, from its config alone, on the meta device: it takes no memory.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .activation import activate


class Row(NamedTuple):
    """Layers of a kind: what computes them, or else the reason why vLLM does."""

    layer: str
    by: str | None
    reason: str


def make_model(model: str, dtype: str) -> nn.Module:
    """Return the model on the meta device.

    Raises:
        ValueError, OSError: What vLLM says of a model that it does not take.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(model=model, dtype=dtype, load_format="dummy", enforce_eager=True, skip_tokenizer_init=True)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{Path(folder, 'store')}", 0, "gloo")
        initialize_model_parallel(1, 1)
        before = torch.get_default_dtype()
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with torch.device("meta"):
                made: nn.Module = initialize_model(config)
        finally:
            torch.set_default_dtype(before)
    return made


def rows_of(model: nn.Module, parts: Sequence[str], dtype: torch.dtype) -> Iterator[Row]:
    """Yield a row for each layer of the model that has one."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from .activations import InfiniOp

    def off(part: str) -> str:
        return f"part {part} is off"

    inside = {id(child) for module in model.modules() if isinstance(module, InfiniOp) for child in module.children()}
    for module in model.modules():
        if id(module) in inside:  # of an op that computes by itself
            continue
        name = next(kind.__name__ for kind in type(module).__mro__ if not kind.__name__.startswith("Infini"))
        if isinstance(module, (RMSNorm, GemmaRMSNorm)):
            yield _norm(name, module, dtype) if "ops" in parts else Row(name, None, off("ops"))
        elif isinstance(module, (LinearBase, ParallelLMHead)):
            yield _linear(name, module) if "linear" in parts else Row(name, None, off("linear"))
        elif isinstance(module, Attention):
            yield _attention(name, module) if "attention" in parts else Row(name, None, off("attention"))
        elif isinstance(module, CustomOp):
            yield _custom_op(name, module) if "ops" in parts else Row(name, None, off("ops"))


def _norm(name: str, module: Any, dtype: torch.dtype) -> Row:
    from .ops import takes_rms_norm

    weight = module.weight if type(module).__name__ == "RMSNorm" else module.weight.float()
    x = torch.empty(1, len(weight), dtype=dtype, device="meta")
    size = getattr(module, "variance_size_override", None)
    if takes_rms_norm(x, weight, module.variance_epsilon, size):
        return Row(name, "infini::rms_norm, add_rms_norm", "")
    return Row(name, None, f"its weight is {weight.dtype} for {dtype} activations, or its variance is of a part")


def _attention(name: str, module: Any) -> Row:
    from .attention import InfiniAttention

    if isinstance(module.impl, InfiniAttention):
        return Row(name, "infini::paged_attention, paged_attention_prefill, paged_caching", "")
    return Row(name, None, activate(()).left.get("attention", f"{type(module.impl).__name__} was chosen"))


def _custom_op(name: str, module: Any) -> Row:
    from .activations import InfiniGeluAndMul, InfiniOp, InfiniRotary, InfiniSiluAndMul

    if isinstance(module, InfiniOp):
        names = {InfiniSiluAndMul: "swiglu", InfiniGeluAndMul: "geglu", InfiniRotary: "rope"}
        return Row(name, next(f"infini::{op}" for kind, op in names.items() if isinstance(module, kind)), "")
    return Row(name, None, activate(()).left.get(name, "there is no op of torch_infini for it"))


def _linear(name: str, module: Any) -> Row:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from .linear import refusal
    from .quantized import InfiniInt4LinearKernel, InfiniInt8LinearKernel

    method = module.quant_method
    if isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)):
        reason = refusal(tuple(module.weight.shape), module.weight.dtype)
        return Row(name, None if reason else "infini::linear_packed", reason or "")
    kernel = getattr(method, "kernel", None) or getattr(getattr(module, "scheme", None), "kernel", None)
    for ours, op in ((InfiniInt4LinearKernel, "infini::linear_int4"), (InfiniInt8LinearKernel, "infini::linear_int8")):
        if isinstance(kernel, ours):
            return Row(name, op, "")
        if isinstance(kernel, ours.__base__):
            supported, reason = ours.is_supported() if hasattr(ours, "is_supported") else (True, None)
            _, reason = ours.can_implement(kernel.config) if supported else (False, reason)
            return Row(name, None, reason or f"{type(kernel).__name__} is before it in vLLM's order")
    return Row(name, None, f"there is no kernel of torch_infini for {type(method).__name__}")


def report(model: str, parts: Sequence[str], dtype: str = "auto") -> str:
    """Return a table of the model's layers: what computes each kind, and why vLLM does the rest.

    Args:
        model: As vLLM's: a folder or a name of the hub; only its config is read.
        parts: Of settings.PARTS.
        dtype: As vLLM's.

    Raises:
        ValueError, OSError: For a model that vLLM does not take.
    """
    done = activate(parts)
    made = make_model(model, dtype)
    of_model = next(p.dtype for p in made.parameters() if p.dtype.is_floating_point)
    counts = Counter(rows_of(made, [part for part in parts if part not in done.left], of_model))
    lines = [f"{part} is inactive: {done.left[part]}" for part in parts if part in done.left]
    for row, count in sorted(counts.items(), key=lambda item: (item[0].by is None, item[0])):
        does = f"by {row.by}" if row.by else f"left to vLLM: {row.reason}"
        lines.append(f"{count:4} x {row.layer:24} {does}")
    return "\n".join(lines)
