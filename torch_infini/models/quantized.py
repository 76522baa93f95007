"""Fill a Llama from a checkpoint of another library: quantized folders, and GGUF files.

Each projection is read, brought into the layout of linear_int4 or linear_int8 and copied to its place, one after the
other; the pages of its file are dropped before the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .._core.memory import allocate, trim
from ..checkpoints import Checkpoint, LinearWeight, Wanted, check_tensors, is_derived
from ..nn import Linear, MergedLinear
from .checkpoint import Slot, follow
from .config import LlamaConfig

_NAME = "torch_infini.models.Llama"
_ROWS = 1024  # of a table that are dequantized at a time; a multiple of 32


def config_of(checkpoint: Checkpoint) -> LlamaConfig:
    """Return the config of a checkpoint."""
    if checkpoint.path.is_dir():
        return LlamaConfig.from_pretrained(checkpoint.path)
    # A file does not name one: that of its matrices that are in no blocks.
    dtypes = [info.dtype for info in checkpoint.tensors.values() if len(info.shape) == 2]
    dtype = next((dtype for dtype in dtypes if dtype.is_floating_point), torch.bfloat16)
    try:
        return LlamaConfig.from_dict({**checkpoint.config, "dtype": str(dtype)})
    except ValueError as error:
        raise ValueError(f"{_NAME}: {checkpoint.path}: {error}") from error


def check(checkpoint: Checkpoint, config: LlamaConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the tensors with those of the config, and check the values of scales.

    Args:
        shapes: Of the tensors of a dense model of the config, by name.

    Raises:
        ValueError: For tensors that are missing, too many or of other shapes, all of them named; for a bias that the
            model has not and that is not zeros; or as Checkpoint.check.
    """
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    wanted = {name: Wanted(tuple(shape)) for name, shape in shapes.items()}
    spare = checkpoint.biases - wanted.keys()

    def optional(name: str) -> bool:
        return name in tied or name in spare or is_derived(name)

    check_tensors(_NAME, checkpoint.path, checkpoint.dequantized, wanted, optional)
    checkpoint.check_zeros(_NAME, spare)
    checkpoint.check()


class Model(Protocol):
    """What is used of a Llama here."""

    dtype: torch.dtype

    @property
    def shares_embedding(self) -> bool: ...

    def slots(self) -> dict[str, Slot]: ...


class Product(NamedTuple):
    """A linear layer of the model, an attribute of `parent`, and its projections."""

    parent: nn.Module
    attribute: str
    projections: Sequence[Rows]

    @property
    def linear(self) -> Linear | MergedLinear:
        linear: Linear | MergedLinear = getattr(self.parent, self.attribute)
        return linear


class Rows(NamedTuple):
    """A projection of a Linear: its name in the checkpoint, and this rank's rows and columns of it."""

    name: str
    rows: slice
    columns: slice
    whole_columns: int


def load(model: Model, checkpoint: Checkpoint, products: Sequence[Product], dense: str, progress: bool | None) -> None:
    """Give a model the weights of a checkpoint that `check` has accepted.

    Args:
        model: Made on its device; its linear layers are replaced.
        checkpoint: Open.
        products: The model's linear layers.
        dense: Format of layers whose values no integers hold, and of those that are not quantized.
        progress: As Llama.from_pretrained.

    Raises:
        ValueError: If tensor parallelism would cut a group or an act-order.
    """
    products = [one for one in products if one.attribute != "head" or not model.shares_embedding]
    sizes = [sum(_bytes(checkpoint, one.name) for one in product.projections) for product in products]

    def work() -> Iterator[None]:
        for product in products:
            _replace(checkpoint, product, dense)
            yield
        for name, slot in model.slots().items():
            _fill(model, checkpoint, name, slot)
            yield

    names = list(model.slots())
    follow(work(), sizes + [_bytes(checkpoint, name) for name in names], progress)


def _bytes(checkpoint: Checkpoint, name: str) -> int:
    """Bytes that are read for a quantized layer or for a tensor."""
    layer = checkpoint.layers.get(name)
    names = [name] if layer is None else layer.names.values()
    infos = [checkpoint.tensors[one] for one in names if one in checkpoint.tensors]
    return sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)


def _replace(checkpoint: Checkpoint, product: Product, dense: str) -> None:
    """Replace a layer by one that has the weights that are quantized; the others are loaded later."""
    old = product.linear
    if any(one.name in checkpoint.layers for one in product.projections) or old.format != dense:
        setattr(product.parent, product.attribute, _linear(checkpoint, old, product.projections, dense))
        trim()


def _fill(model: Model, checkpoint: Checkpoint, name: str, slot: Slot) -> None:
    """Load a tensor that is not the weight of a quantized layer."""
    layer = name.removesuffix(".weight")
    if layer not in checkpoint.layers:
        with checkpoint.read(name) as (tensor,):
            slot.load(slot.cut(tensor), 0)
    elif layer == "model.embed_tokens":
        _dequantize_rows(checkpoint, layer, slot, model.dtype)


def _dequantize_rows(checkpoint: Checkpoint, name: str, slot: Slot, dtype: torch.dtype) -> None:
    layer = checkpoint.layers[name]
    first, rows = (0, layer.n) if slot.part is None else (slot.part.first_row, slot.part.rows)
    for begin in range(first // _ROWS * _ROWS, first + rows, _ROWS):
        values = checkpoint.dequantize(name, begin, min(_ROWS, layer.n - begin))
        low, high = max(first - begin, 0), min(first + rows - begin, _ROWS)
        slot.load(values[low:high].to(dtype), max(begin - first, 0))


class _FusedProjections(NamedTuple):
    """Projections of a Linear that are alike: one product computes them."""

    names: list[Rows]
    weights: list[LinearWeight | None]  # None: not quantized


def _linear(
    checkpoint: Checkpoint, old: Linear | MergedLinear, projections: Sequence[Rows], dense: str
) -> Linear | MergedLinear:
    """Make the layer of these projections, with all weights that are quantized; those that are not are loaded later."""
    device, dtype = next(old.parameters()).device, old.dtype
    parts: list[_FusedProjections] = []
    linears: list[Linear] = []
    for one in projections:
        weight = checkpoint.weight(one.name, dtype) if one.name in checkpoint.layers else None
        if weight is not None:
            weight = _cut(weight, one)
        if parts and _alike(parts[-1].weights[-1], weight):
            parts[-1].names.append(one)
            parts[-1].weights.append(weight)
        else:
            parts.append(_FusedProjections([one], [weight]))
    for part in parts:
        linears.append(_product(part, dense, dtype, device))
        for one in part.names:
            if one.name in checkpoint.layers:
                checkpoint.release(one.name)
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


def _alike(one: LinearWeight | None, other: LinearWeight | None) -> bool:
    """Whether one product can compute two projections."""
    a = "dense" if one is None else one.format
    if a != ("dense" if other is None else other.format):
        return False
    if one is None or other is None or a == "dense":
        return True
    if (one.group, one.zeros is None) != (other.group, other.zeros is None):
        return False
    assert one.scales is not None and other.scales is not None
    if one.columns is None or other.columns is None:
        return one.columns is other.columns and one.scales.dtype == other.scales.dtype
    return torch.equal(one.columns, other.columns) and one.scales.dtype == other.scales.dtype


def _cut(weight: LinearWeight, one: Rows) -> LinearWeight:
    """Return this rank's rows and columns of a weight."""
    first, count = one.columns.start, one.columns.stop - one.columns.start
    if count == one.whole_columns:
        rows = one.rows
        scales = None if weight.scales is None else weight.scales[rows]
        zeros = None if weight.zeros is None else weight.zeros[rows]
        return weight._replace(weight=weight.weight[rows], scales=scales, zeros=zeros)
    if weight.columns is not None:
        raise ValueError(
            f"{_NAME}: tensor_parallel must be 1 for act-order (desc_act), because every rank would need columns of "
            f"the input that other ranks have, got {one.whole_columns // count} ranks for {one.name}"
        )
    if weight.format != "int4":
        scales = None if weight.scales is None else weight.scales[one.rows]
        return weight._replace(weight=weight.weight[one.rows, one.columns], scales=scales)
    if first % weight.group or count % weight.group:
        raise ValueError(
            f"{_NAME}: ranks must not cut the groups of {weight.group} numbers of {one.name}, got {count} columns of "
            "each: use another tensor_parallel"
        )
    assert weight.scales is not None
    groups = slice(first // weight.group, (first + count) // weight.group)
    zeros = None if weight.zeros is None else weight.zeros[one.rows, groups]
    packed = weight.weight[one.rows, first // 2 : (first + count) // 2]
    return weight._replace(weight=packed, scales=weight.scales[one.rows, groups], zeros=zeros)


def _product(part: _FusedProjections, dense: str, dtype: torch.dtype, device: torch.device) -> Linear:
    """Make the layer of projections that are alike, without bias, their weights one below the other."""
    n = [one.rows.stop - one.rows.start for one in part.names]
    k = part.names[0].columns.stop - part.names[0].columns.start
    whole = [weight for weight in part.weights if weight is not None]
    if not whole or whole[0].format == "dense":
        linear = Linear(k, sum(n), False, dense, dtype, device)
        for i, weight in enumerate(part.weights):
            if weight is not None:
                linear.load(weight.weight, sum(n[:i]))
        return linear

    def below(tensors: list[Tensor | None]) -> Tensor | None:
        found = [tensor for tensor in tensors if tensor is not None]
        if not found:
            return None
        memory = allocate(sum(n), *found[0].shape[1:], dtype=found[0].dtype, device=device)
        for i, tensor in enumerate(found):
            memory[sum(n[:i]) : sum(n[: i + 1])] = tensor
        return memory

    packed, scales = below([w.weight for w in whole]), below([w.scales for w in whole])
    assert packed is not None and scales is not None
    columns = whole[0].columns
    return Linear.from_integers(
        packed, scales, below([w.zeros for w in whole]), None if columns is None else columns.to(device), False, dtype
    )
