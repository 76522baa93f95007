"""LinearWeight: the weight of a linear layer as the ops take it; StoredFormat, and functions that formats share.

A format converts its tensors to int4, int8 or blocks if that keeps every value, and to a dense weight otherwise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._core import library
from .._core.devices import backing_type
from ..ops._blocks.int4 import int4_blocks
from ..weights import BLOCKS, FORMATS, Integers

GROUPS = (128, 64, 32)  # group sizes of linear_int4; larger ones are preferred, for fewer scales
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_CHUNK = 1 << 20  # elements that are dequantized at a time


class TensorInfo(NamedTuple):
    """Dtype and shape of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class LinearWeight(NamedTuple):
    """The weight [n, k] of a linear layer.

    Attributes:
        format: "dense"; "int8" or "int4" of linear_int8 and linear_int4; or a kind of block of linear_blocks.
        weight: [n, k] floating; [n, k] int8; [n, k / 2] uint8 as torch_infini.weights.pack_int4 makes it; or
            [n, k / elements, bytes] uint8.
        scales: [n] for int8; [n, k / group] for int4; otherwise None.
        zeros: For int4, [n, k / group] in the dtype of scales; None: 0.
        columns: [k] int64: the weight is multiplied by x[..., columns], for act-order and files whose columns are in
            another order. None: by x.
        activations: "own": x keeps its dtype in the product; "int8": it is quantized too.
    """

    format: str
    weight: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    columns: Tensor | None = None
    activations: Literal["own", "int8"] = "own"

    @property
    def kind(self) -> str:
        """The format of torch_infini.weights that computes with the weight, or "dense"."""
        if self.activations == "int8":
            return self.format
        return {"int8": "w8a16", "int4": "w4a16"}.get(self.format, self.format)

    @property
    def k(self) -> int:
        """The number of columns."""
        if self.format == "dense":
            return self.weight.shape[1]
        of_element = FORMATS[self.format].kinds(1, 0, self.group or 1, torch.float32)["weight"].columns
        return self.weight.shape[1] * of_element

    @property
    def group(self) -> int:
        """int4's group size; 0 for the other formats."""
        if self.format != "int4":
            return 0
        assert self.scales is not None
        return 2 * self.weight.shape[1] // self.scales.shape[1]

    def cut(self, rows: slice, columns: slice) -> LinearWeight:
        """Return views of some rows and columns; a dense copy if they cut a block, or columns in another order.

        Raises:
            ValueError: For columns that cut a group of int4.
        """
        scales = None if self.scales is None else self.scales[rows]
        zeros = None if self.zeros is None else self.zeros[rows]
        k = self.k
        first, end, _ = columns.indices(k)
        if (first, end) == (0, k):
            return self._replace(weight=self.weight[rows], scales=scales, zeros=zeros)
        elements = k // self.weight.shape[1] if self.format in BLOCKS else 1
        if self.columns is not None or first % elements or end % elements:
            part = self._replace(weight=self.weight[rows], scales=scales, zeros=zeros)
            return LinearWeight("dense", part.dense(torch.float32)[:, columns])
        if self.format in BLOCKS:
            return self._replace(weight=self.weight[rows, first // elements : end // elements])
        if self.format != "int4":
            return self._replace(weight=self.weight[rows, columns], scales=scales)
        if first % self.group or end % self.group:
            raise ValueError(
                f"ranks must not cut the groups of {self.group} numbers, got {end - first} columns of each: use "
                "another tensor_parallel_size"
            )
        groups = slice(first // self.group, end // self.group)
        assert scales is not None
        return self._replace(
            weight=self.weight[rows, first // 2 : end // 2],
            scales=scales[:, groups],
            zeros=None if zeros is None else zeros[:, groups],
        )

    def dense(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the values [n, k]."""
        if self.format == "dense":
            return self.weight.to(dtype)
        integers = Integers(self.weight, self.scales, self.zeros)
        weight = FORMATS[self.format].dequantize(integers, 0, integers.rows, self.k, dtype)
        if self.columns is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.columns, weight)
        return weight


class Target(NamedTuple):
    """How a weight will be multiplied.

    Attributes:
        dtype: The dtype of activations, and of dense weights.
        takes_blocks: Whether linear_blocks multiplies there.
        prefers_blocks: Whether it is as fast as linear_int4, so that blocks which could be int4 stay as they are.
    """

    dtype: torch.dtype
    takes_blocks: bool
    prefers_blocks: bool = False

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device, activations: str | None) -> Target:
        """Return the target of a device; activations: "int8" if x is quantized, for which blocks have no product."""
        # In tiles (AMX) each product would decode the whole weight to bfloat16 first, also for one row.
        in_tiles = dtype == torch.bfloat16 and library.capability == "avx512_amx"
        served = all(FORMATS[kind].serves_on(device) for kind in BLOCKS if FORMATS[kind].panel == 1)
        takes = served and not in_tiles and activations != "int8"
        return cls(dtype, takes, takes and backing_type(device) == "cpu")


class Dim(NamedTuple):
    """A dimension of a stored tensor.

    Attributes:
        entries: The size of the dimension.
        of: The dimension of the weight that it runs along; None: neither.
        size: The number of rows or columns of the weight that belong together: they are in `units` entries.
        units: The number of entries for `size` rows or columns.
    """

    entries: int
    of: Literal["rows", "columns"] | None = None
    size: int = 1
    units: int = 1


def rows_in(n: int, size: int = 1) -> Dim:
    """Return a dimension with an entry for each `size` of n rows."""
    return Dim(-(-n // size), "rows", size)


def columns_in(k: int, size: int = 1) -> Dim:
    """Return a dimension with an entry for each `size` of k columns; a size of -1 is all."""
    return Dim(1) if size == -1 else Dim(-(-k // size), "columns", size)


class Expected(NamedTuple):
    """The layouts and dtypes that a tensor of a layer may have.

    Attributes:
        layouts: The allowed layouts.
        dtypes: The allowed dtypes.
        optional: Whether the tensor may be missing.
    """

    layouts: tuple[tuple[Dim, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False

    def layout(self, shape: Sequence[int]) -> tuple[Dim, ...] | None:
        """Return the layout of a tensor of this shape."""
        return next((dims for dims in self.layouts if [dim.entries for dim in dims] == list(shape)), None)


class StoredFormat(ABC):
    """How one format stores the weight [n, k] of a linear layer.

    Tensors are named by the last part of their names: {"qweight": ...}.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in errors and reports."""

    @property
    def quantizes_x(self) -> bool:
        """Whether the checkpoint asks to quantize x to int8, row by row, before the product."""
        return False

    @property
    def scales(self) -> str:
        """The name of the tensor of scales, which must be finite."""
        return "scales"

    @abstractmethod
    def size(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """Return (n, k) of a layer from the shape of the tensor that holds its integers; KeyError without it."""

    @abstractmethod
    def expected(self, n: int, k: int) -> dict[str, Expected]:
        """Return the tensors of a layer; ValueError for sizes that the format does not allow."""

    def checked_tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors whose values `check` reads."""
        return (self.scales,)

    def check(self, tensors: Mapping[str, Tensor], n: int, k: int) -> tuple[str, str, str] | None:
        """Return (tensor, rule, given value) if a value is invalid; `tensors` are the checked_tensors."""
        return not_finite(self.scales, tensors[self.scales])

    @abstractmethod
    def dequantize(self, tensors: Mapping[str, Tensor], n: int, k: int, first: int = 0, count: int = -1) -> Tensor:
        """Compute `count` rows, from `first` on, a multiple of 32, by the format's formula: [count, k] in float64."""

    def weight(self, tensors: Mapping[str, Tensor], n: int, k: int, target: Target) -> LinearWeight:
        """Return the weight for a target: int8, int4 or blocks with exactly the formula's values, or dense with the
        values rounded once.
        """
        return dense_weight(self, tensors, n, k, target.dtype)

    def cut(
        self, tensors: Mapping[str, Tensor], n: int, k: int, rows: slice, columns: slice
    ) -> dict[str, Tensor] | None:
        """Return views of some rows and columns, as the tensors of a smaller layer in this format.

        None if they would cut a word or a block, or columns with act-order.
        """
        wanted = {"rows": rows.indices(n)[:2], "columns": columns.indices(k)[:2]}
        whole, found = {"rows": n, "columns": k}, {}
        for last, rule in self.expected(n, k).items():
            if last not in tensors:
                continue
            tensor = tensors[last]
            for i, dim in enumerate(rule.layout(tensor.shape) or ()):
                if dim.of is None or wanted[dim.of] == (0, whole[dim.of]):
                    continue
                first, end = wanted[dim.of]
                if first % dim.size or (end % dim.size and end != whole[dim.of]):
                    return None
                first, end = (at * dim.units for at in (first // dim.size, -(-end // dim.size)))
                tensor = tensor.narrow(i, first, end - first)
            found[last] = tensor
        try:
            rules = self.expected(*(end - first for first, end in wanted.values()))
        except ValueError:
            return None
        fits = all(rules[last].layout(tensor.shape) is not None for last, tensor in found.items())
        return found if fits else None


def dense_weight(
    format: StoredFormat, tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype
) -> LinearWeight:
    """Dequantize a few rows at a time, to hold nothing of the layer's size in float64."""
    weight = torch.empty(n, k, dtype=dtype)
    step = max(_CHUNK // max(k, 1) // 32, 1) * 32
    for first in range(0, n, step):
        count = min(step, n - first)
        weight[first : first + count] = format.dequantize(tensors, n, k, first, count).to(dtype)
    return LinearWeight("dense", weight)


def groups_of(k: int, group_size: int) -> int:
    """Return the number of groups of a row; ValueError if group_size, -1 for the whole row, does not divide k."""
    if group_size == -1:
        return 1
    if k % group_size:
        raise ValueError(f"in_features must be a multiple of group_size, {group_size}, got {k}")
    return k // group_size


def whole_words(what: str, size: int, elements: int) -> int:
    """Return size / elements; ValueError if it is not an integer."""
    if size % elements:
        raise ValueError(f"{what} must be a multiple of {elements}, the integers of a word, got {size}")
    return size // elements


def signed(values: Tensor) -> Tensor:
    """Return q - 128 as int8, of q as uint8."""
    return (values ^ 128).view(torch.int8)


def by_row(scales: Tensor, n: int) -> Tensor:
    """Expand scales, those of each row or one for all, to [n, groups]."""
    return scales.reshape(1, 1).expand(n, 1) if scales.numel() == 1 else scales.reshape(n, -1)


def int4_group(size: int) -> int:
    """Return the largest group of linear_int4 that divides a format's group; 0 if there is none."""
    return next((group for group in GROUPS if size and size % group == 0), 0)


def int4_weight(
    packed: Tensor, scales: Tensor, zero_points: Tensor | None, target: Target, columns: Tensor | None = None
) -> LinearWeight:
    """Return the weight (q - z) * scale, in blocks or in the layout of linear_int4.

    Args:
        packed: [n, k / 2] uint8, as pack_int4.
        scales: [n, k / size], with a size that int4_group takes.
        zero_points: z, integers of the shape of scales; None: 8 everywhere.
        target: Where the weight will be multiplied. linear_int4 takes scales in its dtype as they are, others in
            float32.
        columns: As in LinearWeight.
    """
    size = 2 * packed.shape[1] // scales.shape[1]
    repeat = size // int4_group(size)

    def of_groups(values: Tensor) -> Tensor:
        return values if repeat == 1 else values.repeat_interleave(repeat, 1)

    halves = scales.half()
    if target.prefers_blocks and torch.equal(halves.float(), scales.float()):  # blocks have scales in float16
        z = torch.full_like(halves, 8) if zero_points is None else zero_points.half()
        n, group = len(packed), int4_group(size)
        blocks = torch.empty(n, 2 * packed.shape[1] // group, 4 + group // 2, dtype=torch.uint8)
        step = max(_CHUNK // 16 // packed.shape[1], 1)
        for first in range(0, n, step):
            rows = slice(first, first + step)
            codes = torch.stack((packed[rows] & 15, packed[rows] >> 4), -1).flatten(1)
            blocks[rows] = int4_blocks(codes, of_groups(halves[rows]), of_groups(z[rows]))
        return LinearWeight(f"int4_{group}", blocks, columns=columns)
    zeros = None
    if zero_points is not None:  # float32 holds the product of 4 or 5 bits with a half precision scale
        scales = scales.float()
        zeros = of_groups((8 - zero_points.to(torch.float32)) * scales)
    elif scales.dtype != target.dtype:
        scales = scales.float()
    return LinearWeight("int4", packed, of_groups(scales).contiguous(), zeros, columns)


def pack_nibbles(values: Tensor) -> Tensor:
    """Pack [n, k] uint8 from 0 to 15 as pack_int4 does, without looking at the values."""
    return values[:, 0::2] | values[:, 1::2] << 4


def nibbles(words: Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """Unpack int32 words [r, c] to integers [r, c * 32 / bits] uint8; order[j] is the place of element j of a word."""
    mask = (1 << bits) - 1
    parts = [(words >> bits * place & mask).to(torch.uint8) for place in order]
    return torch.stack(parts, -1).flatten(1)


def not_finite(name: str, tensor: Tensor) -> tuple[str, str, str] | None:
    """Return the fault of scales that contain infinity or NaN, as StoredFormat.check; None if all are finite."""
    finite = tensor.float().isfinite()
    if finite.all():
        return None
    at = (~finite).nonzero()[0].tolist()
    return name, "be finite", f"{tensor[tuple(at)].item()} at {at}"


def by_group(scales: Tensor, k: int) -> Tensor:
    """Repeat [n, groups] to [n, k] in float64."""
    return scales.double().repeat_interleave(k // scales.shape[1], 1)
