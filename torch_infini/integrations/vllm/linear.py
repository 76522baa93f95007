"""Part linear: unquantized products by panels that are packed after loading; quantized ones in quantized.py.

vLLM has no registry for unquantized products on the CPU: the function that chooses them is wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import vllm.model_executor.layers.utils as layer_utils
from torch import Tensor, nn

from ..._core.library import cpu_capability
from ...nn.linear import Linear, fastest
from .activation import Activation
from .quantized import install_kernels

DISPATCH = "dispatch_cpu_unquantized_gemm"
Product = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]  # of x, the layer's weight, bias


def refusal(shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    """Return why a weight is left to vLLM; None if packing serves it."""
    if len(shape) != 2:
        return f"weights must be matrices, got {list(shape)}"
    if dtype != torch.bfloat16:
        return f"weights are packed in bfloat16, got {str(dtype).removeprefix('torch.')}"
    if fastest("dense", dtype, "cpu") != "packed":
        return f"packing is for avx512_bf16 and neon_bf16, got {cpu_capability()}"
    return None


def packed_product(weight: Tensor) -> Product:
    """Pack a weight [n, k] and return the product with it."""
    n, k = weight.shape
    layer = Linear(k, n, format="packed", dtype=weight.dtype)
    layer.load(weight)
    panels = layer.weight.data

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.infini.linear_packed.default(x, panels, n, bias)

    return product


def packed_when_called(weight: Tensor) -> Product:
    """Return a product that packs at its first call: embeddings are dispatched too, and most are never multiplied."""
    made: list[Product] = []

    def product(x: Tensor, weight_now: Tensor, bias: Tensor | None) -> Tensor:
        if not made:
            made.append(packed_product(weight))
        return made[0](x, weight_now, bias)

    return product


def install(activation: Activation) -> None:
    """Wrap vLLM's choice of the unquantized product."""
    original: Any = getattr(layer_utils, DISPATCH)
    parameters = list(inspect.signature(original).parameters)
    if parameters != ["layer", "remove_weight"]:
        raise TypeError(f"{DISPATCH} takes {', '.join(parameters)}")

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        reason = "it has no weight" if weight.is_meta else refusal(tuple(weight.shape), weight.dtype)
        if reason is not None:
            activation.leave("linear", reason)
            original(layer, remove_weight)
            return
        layer.cpu_linear = (packed_product if remove_weight else packed_when_called)(weight.detach())
        if remove_weight:
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    setattr(layer_utils, DISPATCH, dispatch)
    activation.replaced.append("unquantized linear layers")
    install_kernels(activation)
