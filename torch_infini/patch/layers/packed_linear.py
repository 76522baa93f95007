"""Linear layers with weights in the panels of infini::linear_packed: `patch_model(model, weights="packed")`.

The values stay as they are: a state_dict holds the dense weights, and a layer becomes dense again where panels are not
read (another dtype or device) and where its patch is undone. Rows are freed layer by layer, so that peak memory does
not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._core import library
from ..._core.memory import allocate
from ...nn.linear import fastest
from ...ops._packed import PANEL, packed_shape, unpack_linear
from ..checks.conditions import dense_last, needs_fallback, unsupported_weights
from ..options import PACKED
from ..swap import PLAN, Patched, Unsupported, restore, swap
from .fused import FUSED, FusedProduct
from .quantized import ReadOnly, Reformatted
from .sharded import ShardedLinear

PANELS = "weight_panels"  # the buffer of the weight
linear_packed = torch.ops.infini.linear_packed.default


_reads: list[list[PackedLinear]] = []  # of each noting_reads that is entered, the layers whose weights were read


class StaysDense(Unsupported):  # noqa: N818 (an answer, not an error)
    """The reason why a layer keeps its weight in rows, which infini ops compute as well."""


class PackedPlan(NamedTuple):
    """Where a weight is, and how its layer was before.

    Attributes:
        first: The row of the buffer at which the weight begins; those before it are of another layer of one product.
        requires_grad: Of the parameter.
        before: The layer's other patch and its plan, if it had one.
    """

    first: int
    requires_grad: bool
    before: tuple[type[Patched], Any] | None


class PackedWeight(ReadOnly):
    """The weight of a packed layer."""

    error = (
        "torch_infini: the weight of a packed layer is a copy, which must not be written to: call unpatch_model, write "
        "to it, and patch again"
    )


class PackedLinear(Reformatted):
    """A linear layer with its weight in panels; `weight` is a copy in rows, made at each access."""

    infini_ops = "linear_packed"
    freed = ("weight",)
    unsaved = (PANELS,)
    in_features: int
    out_features: int
    bias: nn.Parameter | None

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if isinstance(module, ShardedLinear):
            raise StaysDense("its weight stays in rows, because it is sharded")
        if getattr(module, "infini_original", type(module)) is not nn.Linear:
            raise Unsupported(f"it is a {type(module).__name__}, not a torch.nn.Linear")
        if reason := unsupported_weights(module):
            raise Unsupported(reason)
        weight = module.get_parameter("weight")
        dtype = str(weight.dtype).removeprefix("torch.")
        if weight.dtype != torch.bfloat16:
            raise StaysDense(f"its weight stays in rows, because panels hold bfloat16, not {dtype}")
        device = "emulated CUDA" if library.emulates_cuda() else str(weight.device)
        if device != "cpu":
            raise StaysDense(f"its weight stays in rows, because panels are read on the CPU, not on {device}")
        if not weight.numel():
            raise StaysDense("its weight stays in rows, because it is empty")
        before = (type(module).__bases__[0], vars(module)[PLAN]) if isinstance(module, Patched) else None
        return [PackedPlan(0, weight.requires_grad, before)]

    @property
    def weight(self) -> Tensor:
        """The weight, [n, k] bfloat16: a new tensor at each access."""
        if not torch.compiler.is_compiling() and _reads:
            _reads[-1].append(self)
        weight = rows_of(self)
        return weight if torch.compiler.is_compiling() else weight.as_subclass(PackedWeight)

    def forward(self, input: Tensor) -> Tensor:
        if needs_fallback(self, input):
            return nn.functional.linear(input, self.weight, self.bias)  # this has a gradient of the input
        return self.product(dense_last(input))

    def product(self, x: Tensor) -> Tensor:
        """Compute forward for a caller that has already ruled out a fallback."""
        check_columns(x, self.in_features)
        plan: PackedPlan = self.__dict__[PLAN]
        panels, bias, first = self._buffers[PANELS], self._parameters["bias"], plan.first
        if not first:
            return linear_packed(x, panels, self.out_features, bias)
        # The rows of another layer before this one's in the first panel are multiplied too.
        bias = None if bias is None else nn.functional.pad(bias, (first, 0))
        return linear_packed(x, panels, first + self.out_features, bias)[..., first:].contiguous()

    @property
    def weight_count(self) -> int:
        return self.out_features * self.in_features

    @property
    def weight_bytes(self) -> int:
        return self.weight_count * 2

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Implement `layer.weight = parameter`: the layer is dense from then on."""
        if name == "weight":
            make_dense(self)
        nn.Module.register_parameter(self, name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Implement `to`: the layer becomes dense where panels are not read."""
        there = fn(self._buffers[PANELS][:0])
        if there.dtype != torch.bfloat16 or there.device.type != "cpu":
            make_dense(self)
            return self._apply(fn, recurse)  # nn.Linear's
        super()._apply(fn, recurse)
        self._buffers[PANELS] = self._buffers[PANELS].contiguous()  # memory_format=torch.channels_last is for images
        fused: FusedPanels | None = vars(self).get(FUSED)
        if fused is not None and not fused.is_whole():
            fused.release()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = rows_of(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        name, shape = f"{prefix}weight", (self.out_features, self.in_features)
        weight = state_dict.get(name)
        if weight is None:
            if strict:
                missing_keys.append(name)
            return
        if name in unexpected_keys:
            unexpected_keys.remove(name)
        if tuple(weight.shape) != shape:
            error_msgs.append(f"size mismatch for {name}: it must have shape {list(shape)}, got {list(weight.shape)}")
            return
        put_rows(self._buffers[PANELS], weight.detach(), vars(self)[PLAN].first)

    def __getstate__(self) -> dict[str, Any]:
        # For a view of shared memory, pickle would write the whole memory once for each layer.
        panels = self._buffers[PANELS]
        whole = panels.untyped_storage().nbytes() == panels.nbytes
        return {**vars(self), "_buffers": {**self._buffers, PANELS: panels if whole else panels.clone()}}

    def extra_repr(self) -> str:
        bias = self._parameters["bias"] is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, packed"


class FusedPanels(FusedProduct):
    """Several packed layers with one input: their rows follow each other, also within a panel."""

    shared = (PANELS,)
    modules: list[Any]
    n: int  # rows of the concatenated weights

    def product(self, x: Tensor) -> Tensor | None:
        if not self.is_whole() and (torch.compiler.is_compiling() or not self.concatenate()):
            return None
        check_columns(x, self.modules[0].in_features)
        bias = None
        for module in self.modules:
            if module._parameters["bias"] is not None:
                bias = self.bias(module._parameters["bias"])
                break
        return linear_packed(x, self.whole[PANELS], self.n, bias)

    def bias(self, some: Tensor) -> Tensor:
        """Return the layers' biases, concatenated, with 0 for a layer without one; `some` is one of them."""
        biases: list[Tensor | None] = [module._parameters["bias"] for module in self.modules]
        return torch.cat(
            [
                some.new_zeros(module.out_features) if bias is None else bias
                for module, bias in zip(self.modules, biases, strict=True)
            ]
        )

    def concatenate(self) -> bool:
        self.release()
        if not all(isinstance(module, PackedLinear) for module in self.modules):
            return False
        whole = empty_panels(self.modules)
        for module, first in zip(self.modules, first_rows(self.modules), strict=True):
            put_rows(whole, rows_of(module), first)
            panels, row = panels_of(whole, first, module.out_features)
            module._buffers[PANELS] = panels
            vars(module)[PLAN] = vars(module)[PLAN]._replace(first=row)
        self.keep(whole)
        return True

    def keep(self, whole: Tensor) -> None:
        """Take over the panels of all layers, of which theirs are views."""
        self.whole = {PANELS: whole}
        self.n = sum(module.out_features for module in self.modules)
        self.keep_parts()


@contextmanager
def noting_reads() -> Iterator[list[PackedLinear]]:
    """Run the body; the layers whose `weight` it reads, each time a copy, are in the list."""
    _reads.append([])
    try:
        yield _reads[-1]
    finally:
        _reads.pop()


def packs_weights(device: torch.device | str) -> bool:
    """Return whether bfloat16 weights on a device are read faster in panels."""
    return fastest("dense", torch.bfloat16, device) == PACKED


def bytes_of(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers, each once."""
    found: dict[int, int] = {}
    for module in model.modules():
        own = {**module._parameters, **module._buffers}
        if isinstance(module, PackedLinear):  # whose panels have rows of other layers too
            del own[PANELS]
            found[id(module)] = module.weight_bytes
        found |= {id(tensor): tensor.nbytes for tensor in own.values() if tensor is not None}
    return sum(found.values())


def check_columns(x: Tensor, k: int) -> None:
    """Check the columns of x, which the shape of a packed weight does not tell."""
    if x.shape[-1] != k:
        raise RuntimeError(f"torch_infini: the input of a packed layer must have {k} columns, got {list(x.shape)}")


def rows_of(module: Any) -> Tensor:
    """Return the weight of a packed layer in rows, a copy."""
    first: int = vars(module)[PLAN].first
    return unpack_linear(module._buffers[PANELS], module.out_features, module.in_features, first)


def put_rows(panels: Tensor, weight: Tensor, first: int) -> None:
    """Write the rows of a weight into panels."""
    weight = weight.to(panels.device, torch.bfloat16)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    with torch.no_grad():
        torch.ops.infini.pack_linear.default(panels, weight, first)


def first_rows(modules: Sequence[Any]) -> list[int]:
    """Return the row at which each layer's weight begins in the panels of all."""
    return [sum(module.out_features for module in modules[:i]) for i in range(len(modules))]


def empty_panels(modules: Sequence[Any]) -> Tensor:
    """Return memory for the weights of layers with one input."""
    shape = packed_shape(sum(module.out_features for module in modules), modules[0].in_features)
    with torch.inference_mode(False):  # inference tensors could not be loaded into later
        whole = allocate(*shape, dtype=torch.bfloat16)
        whole[-1:].zero_()  # including the padding rows: equal weights are equal tensors
    return whole


def panels_of(whole: Tensor, first: int, n: int) -> tuple[Tensor, int]:
    """Return the panels with n rows from `first` on, and the row at which they begin there."""
    if not first and n > (len(whole) - 1) * PANEL:
        return whole, 0
    with torch.inference_mode(False):
        return whole[first // PANEL : -(-(first + n) // PANEL)], first % PANEL


def pack(modules: Sequence[nn.Module]) -> None:
    """Store the weights of layers with one input in panels; each is freed before the next is packed."""
    whole = empty_panels(modules)
    for module, first in zip(modules, first_rows(modules), strict=True):
        plan: PackedPlan = PackedLinear.plans(module)[0]
        put_rows(whole, module.get_parameter("weight").detach(), first)
        panels, row = panels_of(whole, first, module.out_features)  # type: ignore[arg-type]  # of an nn.Linear
        install(module, plan._replace(first=row), panels)
    if len(modules) > 1:
        fused = FusedPanels(modules)
        fused.keep(whole)
        vars(modules[0])[FUSED] = fused


def install(module: nn.Module, plan: PackedPlan, panels: Tensor) -> None:
    """Turn a linear layer into a packed one, and free its weight.

    The layer works after each step, in case of an interrupt.
    """
    if isinstance(module, Patched):
        restore(module)
    module.register_buffer(PANELS, panels, persistent=False)
    swap(module, PackedLinear, plan)
    del module._parameters["weight"]


def make_dense(module: PackedLinear) -> None:
    """Turn a packed layer into what it was before, with a new parameter of the same values."""
    plan: PackedPlan = vars(module)[PLAN]
    own, weight = module._parameters, nn.Parameter(rows_of(module), plan.requires_grad)
    fused: FusedPanels | None = vars(module).get(FUSED)
    if fused is not None:
        fused.release()
    bias = own.pop("bias")
    own |= {"weight": weight, "bias": bias}
    restore(module)
    del module._buffers[PANELS]
    module._non_persistent_buffers_set.discard(PANELS)
    if plan.before is not None:
        swap(module, *plan.before)
