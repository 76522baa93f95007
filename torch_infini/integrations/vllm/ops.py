"""Part ops: RMSNorm as an implementation of vLLM's IR, SiluAndMul, GeluAndMul and rotary embedding as custom ops.

Values are rounded where vLLM rounds them, so that both give the same tokens: its eager formulas round each step,
Inductor, which compiles them otherwise, rounds the result alone.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.kernels  # noqa: F401  # registers the other implementations
from torch import Tensor
from vllm import ir
from vllm.platforms import current_platform

from ...ops.rms_norm import ROUNDINGS
from .activation import Activation
from .activations import install_custom_ops

PROVIDER = "infini"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Compute vLLM's rms_norm of x [..., n]; weight [n] of x's dtype, or float32."""
    assert weight is not None  # see takes_rms_norm
    order = "llama" if weight.dtype == x.dtype and not torch.compiler.is_compiling() else "once"
    return torch.ops.infini.rms_norm.default(x, weight, epsilon, ROUNDINGS[order])


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute vLLM's fused_add_rms_norm of x and x_residual [..., n]: the norm of the sum, and the sum."""
    assert weight is not None
    order = "wide_llama" if weight.dtype == x.dtype and not torch.compiler.is_compiling() else "wide_once"
    return torch.ops.infini.add_rms_norm.default(x, x_residual, weight, epsilon, ROUNDINGS[order])


def takes_rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Return whether infini::rms_norm takes these arguments; vLLM's own is called otherwise."""
    return (
        weight is not None
        and variance_size is None
        and x.dtype in DTYPES
        and weight.dtype in (x.dtype, torch.float32)
        and x.dim() > 0
        and x.stride(-1) == 1
        and weight.stride(-1) == 1
    )


def takes_fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    """Return whether infini::add_rms_norm takes these arguments."""
    return (
        takes_rms_norm(x, weight, epsilon, variance_size)
        and x_residual.dtype == x.dtype
        and x_residual.shape == x.shape
        and x_residual.stride(-1) == 1
    )


def install(activation: Activation) -> None:
    """Register the norms before vLLM's own in the order of the CPU platform, and the custom ops."""
    platform: Any = type(current_platform)
    defaults = platform.get_default_ir_op_priority
    norms = {
        "rms_norm": (rms_norm, takes_rms_norm),
        "fused_add_rms_norm": (fused_add_rms_norm, takes_fused_add_rms_norm),
    }
    ops = {name: getattr(ir.ops, name) for name in norms}
    for name, (norm, takes) in norms.items():
        ops[name].register_impl(PROVIDER, supports_args=takes)(norm)

    def get_default_ir_op_priority(cls: Any, vllm_config: Any) -> Any:
        priority = defaults(vllm_config)
        for name in norms:
            order = getattr(priority, name)
            if PROVIDER not in order:
                order.insert(0, PROVIDER)
        return priority

    # What --ir-op-priority names still comes first.
    platform.get_default_ir_op_priority = classmethod(get_default_ir_op_priority)
    activation.replaced += norms
    install_custom_ops(activation)
