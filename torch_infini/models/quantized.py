"""Fill a Llama from a checkpoint of another library: quantized folders, and GGUF files.

One projection at a time is read, in its blocks or converted to the layout of linear_int4 or linear_int8, and copied to
its place; the pages of its file are dropped before the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .._core.devices import backing_type
from .._core.memory import allocate, trim
from .._core.progress import finish, track
from ..checkpoints import Checkpoint, Layer, LinearWeight, Projection, Wanted, fill
from ..nn import Linear, MergedLinear
from ..weights import Integers, panels_of
from .checkpoint import Slot
from .config import LlamaConfig

_NAME = "torch_infini.models.Llama"


def config_of(checkpoint: Checkpoint) -> LlamaConfig:
    """Return the config of a checkpoint."""
    if checkpoint.path.is_dir():
        return LlamaConfig.from_pretrained(checkpoint.path)
    # A GGUF file does not name a dtype: use that of its unquantized matrices.
    dtypes = [info.dtype for info in checkpoint.tensors.values() if len(info.shape) == 2]
    dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.bfloat16)
    try:
        return LlamaConfig.from_dict({**checkpoint.config, "dtype": str(dtype)})
    except ValueError as error:
        raise ValueError(f"{_NAME}: {checkpoint.path}: {error}") from error


def check(checkpoint: Checkpoint, config: LlamaConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the tensors with those of the config, and check the values of scales; errors as Checkpoint.check_model.

    Args:
        shapes: The shapes of the tensors of a dense model of this config, by name.
    """
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    wanted = {name: Wanted(tuple(shape)) for name, shape in shapes.items()}
    checkpoint.check_model(_NAME, wanted, lambda name: name in tied)


class Model(Protocol):
    """The interface of Llama that this module uses."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def shares_embedding(self) -> bool: ...

    def slots(self) -> dict[str, Slot]: ...


class Product(NamedTuple):
    """A linear layer of the model, an attribute of `parent`, and its projections."""

    parent: nn.Module
    attribute: str
    projections: Sequence[Projection]

    @property
    def linear(self) -> Linear | MergedLinear:
        linear: Linear | MergedLinear = getattr(self.parent, self.attribute)
        return linear


def load(model: Model, checkpoint: Checkpoint, products: Sequence[Product], dense: str, progress: bool | None) -> None:
    """Load the weights of a checkpoint that `check` has accepted into a model.

    Args:
        model: On its device; its linear layers are replaced.
        checkpoint: Open.
        products: The model's linear layers.
        dense: Format of layers that are not quantized, or whose values do not fit our integers.
        progress: As Llama.from_pretrained.

    Raises:
        ValueError: If tensor parallelism would cut a group.
    """
    products = [one for one in products if one.attribute != "head" or not model.shares_embedding]
    names = list(model.slots())
    sizes = [sum(checkpoint.stored_bytes(one.name) for one in product.projections) for product in products]
    layers = [Layer(product.projections, partial(_put, product, dense)) for product in products]
    sizes += [checkpoint.stored_bytes(name) for name in names]
    steps = fill(checkpoint, model.dtype, layers, model.slots, model.device)
    finish(track(steps, "loading", sizes, progress, "B"))


def _put(product: Product, dense: str, weights: list[LinearWeight | None]) -> None:
    """Replace a layer by one with these weights; unquantized projections are loaded later."""
    old = product.linear
    if old.format != dense or any(weight is not None for weight in weights):
        setattr(product.parent, product.attribute, _linear(old, product.projections, weights, dense))
        trim()


class _FusedProjections(NamedTuple):
    """Projections whose weights have the same form, so that one Linear computes them."""

    projections: list[Projection]
    weights: list[LinearWeight | None]  # None: not quantized


def _linear(
    old: Linear | MergedLinear, projections: Sequence[Projection], weights: Sequence[LinearWeight | None], dense: str
) -> Linear | MergedLinear:
    """Make the layer of these projections with all quantized weights; unquantized ones are loaded later."""
    device, dtype = next(old.parameters()).device, old.dtype
    parts: list[_FusedProjections] = []
    for one, weight in zip(projections, weights, strict=True):
        if parts and _can_fuse(parts[-1].weights[-1], weight):
            parts[-1].projections.append(one)
            parts[-1].weights.append(weight)
        else:
            parts.append(_FusedProjections([one], [weight]))
    linears = [_product(part, dense, dtype, device) for part in parts]
    has_bias = old.bias is not None
    if len(linears) == 1:
        linear = linears[0]
        if has_bias:
            linear.bias = old.bias
        return linear
    merged = MergedLinear(linears, old.bias)
    if old.bias is not None:
        first = 0
        for linear in linears:
            end = first + linear.out_features
            linear.bias = nn.Parameter(old.bias.data[first:end], requires_grad=False)
            first = end
    return merged


def _can_fuse(one: LinearWeight | None, other: LinearWeight | None) -> bool:
    """Return whether one Linear can compute two projections."""
    a = "dense" if one is None else one.kind
    if a != ("dense" if other is None else other.kind):
        return False
    if one is None or other is None or a == "dense":
        return True
    if (one.group, one.zeros is None) != (other.group, other.zeros is None):
        return False
    if (None if one.scales is None else one.scales.dtype) != (None if other.scales is None else other.scales.dtype):
        return False
    if one.columns is None or other.columns is None:
        return one.columns is other.columns
    return torch.equal(one.columns, other.columns)


def _product(part: _FusedProjections, dense: str, dtype: torch.dtype, device: torch.device) -> Linear:
    """Make a Linear, without bias, of the projections' weights concatenated by rows."""
    n = [one.rows.stop - one.rows.start for one in part.projections]
    k = part.projections[0].columns.stop - part.projections[0].columns.start
    whole = [weight for weight in part.weights if weight is not None]
    if not whole or whole[0].format == "dense":
        linear = Linear(k, sum(n), False, dense, dtype, device)
        for i, weight in enumerate(part.weights):
            if weight is not None:
                linear.load(weight.weight, sum(n[:i]))
        return linear

    def concatenate(tensors: list[Tensor | None]) -> Tensor | None:
        found = [tensor for tensor in tensors if tensor is not None]
        if not found:
            return None
        memory = allocate(sum(n), *found[0].shape[1:], dtype=found[0].dtype, device=device)
        for i, tensor in enumerate(found):
            memory[sum(n[:i]) : sum(n[: i + 1])] = tensor
        return memory

    columns = None if whole[0].columns is None else whole[0].columns.to(device)
    panels = panels_of(whole[0].kind, [w.weight for w in whole], dtype) if backing_type(device) == "cpu" else None
    if panels is not None:
        return Linear.from_integers(f"{whole[0].kind}_panels", k, Integers(panels), columns, False, dtype)
    packed = concatenate([w.weight for w in whole])
    assert packed is not None
    integers = Integers(packed, concatenate([w.scales for w in whole]), concatenate([w.zeros for w in whole]))
    return Linear.from_integers(whole[0].kind, k, integers, columns, False, dtype)
