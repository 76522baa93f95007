"""Linear layers of a patched model: products without a module call, and several products of one input in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..checks.conditions import dense_last, is_plain, needs_fallback, unhooked, unsupported_weights
from ..shares import LinearShard, local
from ..swap import PLAN, Patched, Unsupported
from .fused import FUSED, FusedProduct
from .packed_linear import PackedLinear
from .quantized_linear import QuantizedLinear
from .sharded import ShardedLinear

linear = torch.ops.infini.linear.default
fused_linear = torch.ops.infini.fused_linear.default
matmul = torch.ops.infini.matmul.default

Product = Callable[[Tensor], Tensor]
_PRODUCTS = (PackedLinear.forward, QuantizedLinear.forward, ShardedLinear.forward)  # of classes with `product`


def product_of(module: Any) -> Product | None:
    """Return a function that computes a linear layer without calling it; None with hooks or for another class."""
    if is_plain(module):
        own = module._parameters  # the dict, because parameters may be replaced
        return lambda x: linear(x, own["weight"], own["bias"])
    if type(module).forward in _PRODUCTS and unhooked(module):
        product: Product = module.product
        return product
    return None


def writable_product_of(module: Any) -> Product:
    """Return a function that computes a linear layer into memory that no hook has seen and the caller may write."""
    product = product_of(module)
    return product or (lambda x: module(x).clone(memory_format=torch.contiguous_format))


def fused_product(modules: Sequence[Any]) -> Callable[[Tensor], Tensor | None] | None:
    """Return a function that computes two or three linear layers of one input, concatenated by columns, or None.

    They must be plain, column-parallel shards, or stored together. Weights are not copied.
    """
    fused: FusedProduct | None = modules[0].__dict__.get(FUSED)
    if fused is not None:
        return fused.product if fused.consists_of(modules) else None
    own = [module._parameters for module in modules]
    if all(is_plain(module) for module in modules):
        if len(own) == 2:
            a, b = own
            return lambda x: fused_linear(x, a["weight"], b["weight"], None, a["bias"], b["bias"])
        a, b, c = own
        return lambda x: fused_linear(x, a["weight"], b["weight"], c["weight"], a["bias"], b["bias"], c["bias"])
    if all(is_plain(module) or is_column_parallel(module) for module in modules):
        return lambda x: product_of_shards(x, own)
    return None


def product_of_shards(x: Tensor, own: Sequence[dict[str, Any]]) -> Tensor:
    """Compute the concatenated products of this rank's rows of each weight."""
    weights, biases = ([local(part[name]) for part in own] for name in ("weight", "bias"))
    absent = [None] * (3 - len(own))
    return fused_linear(x, *weights, *absent, *biases, *absent)


def is_column_parallel(module: nn.Module) -> bool:
    """Return whether the layer is sharded and each rank keeps its own columns."""
    if type(module).forward is not ShardedLinear.forward or not unhooked(module):
        return False
    shard: LinearShard = module.__dict__[PLAN]
    return shard.keeps_local


class Linear(Patched):
    """A linear layer outside attention and MLP, such as lm_head."""

    infini_ops = "linear"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if type(module) is not nn.Linear:
            raise Unsupported("it is not a torch.nn.Linear")
        if reason := unsupported_weights(module):
            raise Unsupported(reason)
        return [None]

    def forward(self, input: Tensor) -> Tensor:
        if needs_fallback(self, input):
            return super().forward(input)
        parameters = self._parameters
        x = input if input.is_contiguous() else dense_last(input)
        return linear(x, parameters["weight"], parameters["bias"])


class TransposedLinear(Patched):
    """GPT-2's linear layer, `Conv1D`, whose weight has a row for each input: y = x weight + bias."""

    infini_ops = "matmul"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if type(module) is not Conv1D:
            raise Unsupported("it is not a Conv1D of transformers")
        if reason := unsupported_weights(module):
            raise Unsupported(reason)
        return [None]

    def forward(self, x: Tensor) -> Tensor:
        if needs_fallback(self, x):
            return super().forward(x)
        parameters = self._parameters
        rows = dense_last(x).reshape(-1, x.shape[-1])
        return matmul(rows, parameters["weight"]).add_(parameters["bias"]).view(*x.shape[:-1], -1)
