"""Linear layers with weights of torch_infini.weights: `patch_model(model, weights="int8" | "int4")`.

The full-precision weights are freed layer by layer, so that peak memory does not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...checkpoints import LinearWeight
from ...weights import BLOCKS, FORMATS, Integers, best, in_panels, out_of_panels, served_on
from ..checks.conditions import dense_last, needs_fallback, unsupported_weights
from ..shares import LinearShard, local
from ..swap import PLAN, Patched, Unsupported, restore, swap
from .fused import FUSED, FusedProduct
from .quantized import Quantized, all_finite, shown
from .sharded import ShardedLinear

INTEGERS, SCALES, ZEROS = "weight_integers", "weight_scales", "weight_zeros"
COLUMNS = "weight_columns"  # with act-order: the column of x for each column of the weight
BUFFER_NAMES = {"weight": INTEGERS, "scales": SCALES, "zeros": ZEROS}  # the buffers of Integers' fields
NAMES = (*BUFFER_NAMES.values(), COLUMNS)


class WeightPlan(NamedTuple):
    """How a weight is stored: a format of torch_infini.weights, and the size of its groups where it has several."""

    format: str
    group: int
    dtype: torch.dtype  # of the original weight, and of the layer's input and output
    shard: LinearShard | None = None  # of a sharded layer, which has this rank's integers


class QuantizedLinear(Quantized):
    """A linear layer with a quantized weight; `weight` is dequantized at each access."""

    freed = ("weight",)
    kept = (SCALES, ZEROS)
    infini_ops = " or ".join(dict.fromkeys(one.op or f"linear_{one.name}" for one in FORMATS.values()))
    in_features: int
    out_features: int
    bias: nn.Parameter | None

    @classmethod
    def ops(cls, plan: WeightPlan) -> str:
        op = FORMATS[plan.format].op or f"linear_{plan.format}"
        return op if plan.shard is None else f"{op}{plan.shard.collective}"

    @classmethod
    def plans(cls, module: nn.Module, format: str = "int8") -> Sequence[Any]:
        if getattr(module, "infini_original", type(module)) is not nn.Linear:
            raise Unsupported(f"it is a {type(module).__name__}, not a torch.nn.Linear")
        shard: LinearShard | None = vars(module)[PLAN] if isinstance(module, ShardedLinear) else None
        if shard is None and (reason := unsupported_weights(module)):
            raise Unsupported(reason)
        assert isinstance(module, nn.Linear)
        if not all_finite(local(module.weight)):
            raise Unsupported("its weight contains infinity or NaN, which cannot be quantized")
        dtype = module.weight.dtype
        kind, k = best(format, local(module.weight).device), columns_of(module, shard)
        try:
            group = kind.group(k)
        except ValueError as error:
            ranks = f" of each of {shard.tp_group.size} ranks" if shard is not None and shard.row_parallel else ""
            raise Unsupported(f"its rows{ranks} must {error}, got {k}") from None
        return [WeightPlan(kind.name, group, dtype, shard)]

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, [n, k] in the layer's dtype: a new tensor at each access.

        Of a sharded layer, this rank's shard.
        """
        plan: WeightPlan = vars(self)[PLAN]
        integers = integers_of(self._buffers)
        k, format = columns_of(self, plan.shard), FORMATS[plan.format]
        weight = format.dequantize(integers, 0, integers.rows_of(format), k, plan.dtype)
        columns = self._buffers.get(COLUMNS)
        if columns is not None:
            weight = torch.empty_like(weight).index_copy_(1, columns, weight)
        return shown(weight)

    def forward(self, input: Tensor) -> Tensor:
        if not needs_fallback(self, input):
            return self.product(dense_last(input))
        if vars(self)[PLAN].shard is None:  # this has a gradient of the input
            return nn.functional.linear(input, self.weight, self.bias)
        dtype, gradients = str(input.dtype).removeprefix("torch."), "on" if torch.is_grad_enabled() else "off"
        raise RuntimeError(
            "torch_infini: a sharded layer with quantized weights must be called under torch.no_grad, in float32, "
            "bfloat16 or float16, without autocast and hooks for all modules; "
            f"got {dtype} with gradients {gradients}"
        )

    def product(self, x: Tensor) -> Tensor:
        """Compute forward for a caller that has already ruled out a fallback."""
        plan: WeightPlan = self.__dict__[PLAN]
        integers, columns = integers_of(self._buffers), self._buffers.get(COLUMNS)
        if columns is not None:
            x = x.index_select(-1, columns)
        if plan.shard is None:
            return product(plan.format, x, integers, self._parameters["bias"])
        bias = local(self._parameters["bias"])
        return plan.shard.apply(x, lambda x, bias: product(plan.format, x, integers, bias), bias)

    @property
    def plan(self) -> WeightPlan:
        plan: WeightPlan = vars(self)[PLAN]
        return plan

    @property
    def weight_count(self) -> int:
        return integers_of(self._buffers).rows_of(FORMATS[self.plan.format]) * columns_of(self, self.plan.shard)

    @property
    def is_savable(self) -> bool:
        plan, format = self.plan, FORMATS[self.plan.format]
        if plan.group not in format.groups:
            return False
        kinds = format.kinds(1, plan.group or 1, plan.group, plan.dtype)
        return {BUFFER_NAMES[name] for name in kinds} == {name for name in NAMES if name in self._buffers}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        format, integers = self.plan.format, integers_of(self._buffers)
        if format in BLOCKS:
            empty = integers.weight[:0]
            there = served_on(fn(empty).device, format, integers)
            if there is None:
                make_dense(self)
                return self._apply(fn, recurse)  # nn.Linear's
            self.relay(lambda *_: there)
            if fn(empty.new_empty(0, dtype=self.plan.dtype)).dtype != self.plan.dtype:
                self.relay(out_of_panels)
        super()._apply(fn, recurse)
        fused: FusedLinear | None = vars(self).get(FUSED)
        if fused is not None and not fused.is_whole():
            fused.release()
        return self

    def relay(self, to: Callable[[str, Integers], tuple[str, Integers]]) -> None:
        """Store the weight as `to` does, a function from a format and a weight to a format and a weight."""
        format, integers = to(self.plan.format, integers_of(self._buffers))
        if format != self.plan.format:
            self._buffers[INTEGERS] = integers.weight
            vars(self)[PLAN] = self.plan._replace(format=format)

    def lay_out(self) -> None:
        """Hold blocks in panels where their products are faster so."""
        if self.plan.shard is None:
            self.relay(lambda format, integers: in_panels(format, integers, self.plan.dtype))

    def __getstate__(self) -> dict[str, Any]:
        # For a view of shared memory, pickle would write the whole memory once for each layer.
        own = {
            name: b if b is None or b.untyped_storage().nbytes() == b.nbytes else b.clone()
            for name, b in self._buffers.items()
        }
        return {**vars(self), "_buffers": own}

    def extra_repr(self) -> str:
        plan: WeightPlan = vars(self)[PLAN]
        group = f", group={plan.group}" if plan.group else ""
        bias = self._parameters["bias"] is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {plan.format}{group}"


def integers_of(buffers: Mapping[str, Tensor | None]) -> Integers:
    """Return the tensors of a quantized weight among a layer's buffers."""
    weight = buffers[INTEGERS]
    assert weight is not None
    return Integers(weight, buffers.get(SCALES), buffers.get(ZEROS))


def columns_of(module: nn.Module, shard: LinearShard | None) -> int:
    """Return the number of columns of a layer's weight; in a sharded layer, of this rank's shard."""
    columns: int = module.in_features  # type: ignore[assignment]
    return columns // shard.tp_group.size if shard is not None and shard.row_parallel else columns


def product(format: str, x: Tensor, integers: Integers, bias: Tensor | None) -> Tensor:
    """Multiply x by a quantized weight."""
    return FORMATS[format].product(x, integers, bias, False, None)


class FusedLinear(FusedProduct):
    """Several quantized layers with one input."""

    shared = (INTEGERS, SCALES)

    def product(self, x: Tensor) -> Tensor | None:
        if not self.is_whole() and (torch.compiler.is_compiling() or not self.concatenate()):
            return None
        plan: WeightPlan = self.modules[0].__dict__[PLAN]
        return product(plan.format, x, integers_of(self.whole), None)

    def concatenate(self) -> bool:
        self.release()
        modules = [module for module in self.modules if isinstance(module, QuantizedLinear)]
        if len(modules) < len(self.modules) or any(module.bias is not None for module in modules):
            return False
        plans = {module.plan for module in modules}
        if len(plans) > 1 or any(plan.shard is not None and not plan.shard.keeps_local for plan in plans):
            return False
        kinds = {tuple((name, b.dtype) for name in NAMES if (b := m._buffers.get(name)) is not None) for m in modules}
        if len(kinds) > 1 or COLUMNS in modules[0]._buffers:
            return False
        format = FORMATS[modules[0].plan.format]
        if any(integers_of(module._buffers).rows_of(format) % format.panel for module in modules[:-1]):
            return False
        for name in BUFFER_NAMES.values():
            if name in modules[0]._buffers:
                tensors = [module._buffers[name] for module in modules]
                with torch.inference_mode(False):  # inference tensors could not be loaded into later
                    self.whole[name] = torch.cat(tensors)
                    parts = self.whole[name].split([len(tensor) for tensor in tensors])
                for module, part in zip(modules, parts, strict=True):
                    module._buffers[name] = part
        self.keep_parts()
        return True


def fuse(modules: Sequence[nn.Module]) -> None:
    """Compute several layers with the same input by one product, if they are quantized alike."""
    fused = FusedLinear(modules)
    if len(modules) > 1 and fused.concatenate():
        vars(modules[0])[FUSED] = fused


def quantize_layer(module: nn.Module, format: str) -> None:
    """Quantize the weight of a linear layer."""
    plan: WeightPlan = QuantizedLinear.plans(module, format)[0]
    if isinstance(module, Patched):  # replaces another patch
        restore(module)
    assert isinstance(module, nn.Linear)
    weight = local(module.weight).detach()
    kind = FORMATS[plan.format]
    n, k = weight.shape
    new = lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=weight.device)  # padding is 0
    integers = kind.empty(n, k, plan.group, weight.dtype, new)
    kind.quantize(weight, integers)
    install(module, plan, {BUFFER_NAMES[name]: x for name, x in integers._asdict().items() if x is not None})


def empty_buffers(module: nn.Linear, plan: WeightPlan) -> dict[str, Tensor]:
    """Return the buffers of a quantized layer on the meta device, to be loaded later."""
    kinds = FORMATS[plan.format].kinds(module.out_features, module.in_features, plan.group, plan.dtype)
    return {
        BUFFER_NAMES[name]: torch.empty(kind.shape, dtype=kind.dtype, device="meta") for name, kind in kinds.items()
    }


def install(module: nn.Linear, plan: WeightPlan, buffers: dict[str, Tensor]) -> None:
    """Turn an nn.Linear into a quantized layer with these buffers, and free its weight.

    The layer works after each step, in case of an interrupt.
    """
    for name, value in buffers.items():
        module.register_buffer(name, value)
    swap(module, QuantizedLinear, plan)
    del module._parameters["weight"]


def make_dense(module: QuantizedLinear) -> None:
    """Turn a quantized layer into an nn.Linear with the dequantized weight."""
    weight = module.weight.detach().as_subclass(Tensor)
    restore(module)
    for name in NAMES:
        module._buffers.pop(name, None)
    module.weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[misc]  # it is a plain nn.Linear now


def install_weight(module: nn.Linear, weight: LinearWeight, dtype: torch.dtype) -> bool:
    """Give a linear layer the weight of a checkpoint; return whether it is now a quantized layer."""
    if weight.format == "dense":
        module.weight = nn.Parameter(weight.weight.to(dtype), requires_grad=False)
        return False
    integers = Integers(weight.weight, weight.scales, weight.zeros)
    format, integers = in_panels(weight.kind, integers, dtype)
    buffers = {BUFFER_NAMES[name]: tensor for name, tensor in integers._asdict().items()} | {COLUMNS: weight.columns}
    plan = WeightPlan(format, weight.group, dtype)
    install(module, plan, {name: tensor for name, tensor in buffers.items() if tensor is not None})
    return True
