"""Quantized products for vLLM: int8 with int8 activations, and 4 bits in groups (AWQ, GPTQ, compressed-tensors).

Both are put before vLLM's kernels for the CPU, which serve what can_implement refuses here.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.kernels.linear as kernels
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import (
    Int8ScaledMMLinearKernel,
    Int8ScaledMMLinearLayerConfig,
    MPLinearKernel,
    MPLinearLayerConfig,
    register_linear_kernel,
)
from vllm.model_executor.layers.quantization.utils.w8a8_utils import convert_to_channelwise
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types

from ..._core.library import cpu_capability
from ...checkpoints.weight import Target, int4_group, int4_weight, nibbles
from ...weights import FORMATS, Integers, in_panels, quantizes_x
from .activation import Activation

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Answer = tuple[bool, "str | None"]  # whether a layer is served, and why not


def has_tiles() -> str | None:
    """Return why quantized products are left to vLLM on this CPU; None if they are not."""
    if cpu_capability() == "avx512_amx":
        return "its own products in AMX tiles are used, which were not compared with torch_infini's"
    return None


def parameter(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


class InfiniInt4LinearKernel(MPLinearKernel):  # type: ignore[misc]  # vLLM is untyped here
    """Weights of 4 bits with a scale, and perhaps a zero point, for each group of a row; x keeps its dtype."""

    @classmethod
    def get_min_capability(cls) -> int:
        return -1  # of a GPU

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> Answer:
        """Return whether infini::linear_int4, linear_blocks or linear_block_panels multiplies by such a weight."""
        k = c.partition_weight_shape[0]
        size = k if c.group_size == -1 else c.group_size
        if reason := has_tiles():
            return False, reason
        if c.weight_type not in (scalar_types.uint4, scalar_types.uint4b8):
            return False, f"weights must be of 4 bits (uint4, uint4b8), got {c.weight_type}"
        if c.act_type not in DTYPES:
            return False, f"activations must be bfloat16, float16 or float32, got {c.act_type}"
        if not int4_group(size) or k % size:
            return False, f"groups must be multiples of 32 that divide {k} columns, got {size}"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the layer's tensors, which are compressed-tensors' [n, ...] or GPTQ's [..., n], to our layout."""

        def by_row(name: str) -> Tensor:
            stored = getattr(layer, name)
            return (stored.data if stored.output_dim == 0 else stored.data.t()).contiguous()

        words = by_row(self.w_q_name)  # [n, k / 8] int32, the first column in the lowest bits
        scales = by_row(self.w_s_name)
        zero_points = None
        if self.config.zero_points:
            assert self.w_zp_name is not None
            # Packed by rows: a word has the zero points of 8 rows.
            zero_points = nibbles(by_row(self.w_zp_name).t().contiguous()).t()
        elif self.config.weight_type == scalar_types.uint4:
            zero_points = torch.zeros_like(scales)
        weight = int4_weight(words.view(torch.uint8), scales, zero_points, Target.of(self.config.act_type, CPU, None))
        integers = Integers(weight.weight, weight.scales, weight.zeros)
        name, self.integers = in_panels(weight.kind, integers, self.config.act_type)
        self.format = FORMATS[name]
        for name in (self.w_q_name, self.w_s_name, self.w_zp_name):
            if name is not None and getattr(layer, name, None) is not None:
                setattr(layer, name, parameter(torch.empty(0)))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [..., k] @ weight^T + bias."""
        return self.format.product(x, self.integers, bias, True, None)


class InfiniInt8LinearKernel(Int8ScaledMMLinearKernel):  # type: ignore[misc]
    """Int8 weights with a scale per row, or one for all; rows of x are quantized in the product, symmetrically."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Return whether this CPU multiplies integers."""
        if reason := has_tiles():
            return False, reason
        if not quantizes_x(torch.empty(1, 32, dtype=torch.bfloat16), 8, same_bits=True):
            return False, f"the CPU must multiply integers (VNNI, dot products), got {cpu_capability()}"
        return True, None

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> Answer:
        """Return whether infini::linear_int8 quantizes x as the checkpoint says."""
        if c.is_static_input_scheme:
            return False, "the scale of activations must be their own (dynamic), got one of the checkpoint (static)"
        if not c.input_symmetric:
            return False, "activations must be quantized symmetrically, got a zero point"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Give the weight [n, k] one float32 scale for each of its rows."""
        weight, scales = (getattr(layer, name).data for name in self.layer_param_names[:2])
        if not self.config.is_channelwise and scales.numel() > 1:
            scales = convert_to_channelwise(scales, layer.logical_widths)  # of projections that were joined
        rows = scales.float().reshape(-1).expand(len(weight)).contiguous()
        for name, value in zip(self.layer_param_names, (weight.contiguous(), rows)):
            setattr(layer, name, parameter(value))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [..., k] @ weight^T + bias."""
        weight, scales = (getattr(layer, name) for name in self.layer_param_names[:2])
        return torch.ops.infini.linear_int8.default(x, weight, scales, bias, True)


def install_kernels(activation: Activation) -> None:
    """Register the kernels, first in vLLM's order."""
    for kernel, kind, table in (
        (InfiniInt4LinearKernel, "mp", kernels._POSSIBLE_KERNELS),
        (InfiniInt8LinearKernel, "int8", kernels._POSSIBLE_INT8_KERNELS),
    ):
        register_linear_kernel(kernel, PlatformEnum.CPU, kind)
        order = table[PlatformEnum.CPU]
        order.insert(0, order.pop())
        activation.replaced.append(f"quantized linear layers ({kernel.__name__})")
