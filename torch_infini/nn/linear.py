"""Linear layers with weights that are dense, packed or in a format of torch_infini.weights, and the embedding.

The ops are infini::linear, linear_packed, those of the formats, and embedding. Several projections of one input (q/k/v,
gate/up) are one Linear, whose weight is theirs, concatenated by rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .._core import library
from .._core.devices import backing_type
from .._core.memory import allocate
from ..distributed import TPGroup
from ..ops._packed import packed_shape, unpack_linear
from ..weights import BLOCKS, FORMATS, BlockFormat, Integers, best, names, out_of_panels, served_on

# Instruction sets that multiply bfloat16 in pairs, for which packing is faster. Tile registers use unpacked weights: on
# a CPU with tiles, packed panels were read 11 % slower (Xeon, Sapphire Rapids).
MULTIPLIES_BFLOAT16 = ("avx512_bf16", "neon_bf16")


class Linear(nn.Module):
    """y = x @ weight^T + bias.

    On the CPU the bits of a row of y depend on that row of x alone, not on the number of rows.

    Args:
        in_features: Columns of x, k.
        out_features: Columns of y, n.
        bias: Whether there is a bias.
        format: "dense"; "packed", the layout of infini::linear_packed for bfloat16 on the CPU; or a format of
            torch_infini.weights: "int8", with a scale per row of the weight; "int4", with a scale and a zero per group
            of 64 (or 32) weights of a row; "group8" (int8) or "table4" (4-bit table indices), with a scale per 16
            weights, which `load` makes on the CPU only. Rows of x are quantized to int8 too: always with the last two
            formats, with the others if the CPU multiplies integers. "w8a16" and "w4a16" are int8 and int4 without that.
            The blocks of checkpoints ("q8_0", "q6_k", "fp8", ...: ops.linear_blocks) come from from_integers.
        dtype: The dtype of x, y, bias and a dense weight.
        device: The weight's device.

    Attributes:
        weight: [n, k] in dtype; packed [n / 48, k / 2, 48, 2], rounded up; [n, k] int8; [n, k / 2] uint8
            (torch_infini.weights.pack_int4); [n / 16, k / 64, bytes] uint8, rounded up
            (ops.quantize_group8, quantize_table4); or blocks [n, k / elements, bytes] uint8.
        scales: [n] float32; for int4 [n, k / group] in dtype; None for dense and packed weights and blocks.
        zeros: [n, k / group] in dtype for int4; otherwise None.
        columns: [k] int64, the order in which the weight uses the columns of x; None: in order. See from_integers.
        bias: [n] in dtype, or None.

    Raises:
        ValueError: For an unknown format, a format that does not support the dtype or device, or a k that int4's groups
            do not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        format: str = "dense",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if format not in ("dense", "packed", *FORMATS):
            known = ", ".join(map(repr, ("dense", "packed", *FORMATS)))
            raise ValueError(f"torch_infini.nn.Linear: format must be one of {known}, got {format!r}")
        n, k = out_features, in_features
        dtype = dtype or torch.get_default_dtype()
        kind = FORMATS.get(format)
        if kind is not None and device is not None and not kind.serves_on(torch.device(device)):
            raise ValueError(
                f"torch_infini.nn.Linear: format {format!r} must be on a device that has its kernels, got {device}"
            )
        if format == "packed" and (dtype != torch.bfloat16 or backing_type(device or "cpu") != "cpu"):
            raise ValueError(
                "torch_infini.nn.Linear: format 'packed' must be of bfloat16 on the CPU, got "
                f"{str(dtype).removeprefix('torch.')} on {device or 'cpu'}"
            )
        if kind is not None and format in BLOCKS and n % kind.panel:  # the op has no other number of rows
            raise ValueError(
                f"torch_infini.nn.Linear: out_features must be a multiple of {kind.panel} for {format!r}, got {n}"
            )
        self.in_features, self.out_features, self.format, self.dtype = k, n, format, dtype

        def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return allocate(*shape, dtype=dtype, device=device)

        def parameter(x: Tensor | None) -> nn.Parameter | None:
            return None if x is None else nn.Parameter(x, requires_grad=False)

        scales: Tensor | None = None
        zeros: Tensor | None = None
        if kind is None:
            weight = new((n, k) if format == "dense" else packed_shape(n, k), dtype)
        else:
            try:
                group = kind.group(k)
            except ValueError as error:
                raise ValueError(f"torch_infini.nn.Linear: in_features must {error}, got {k}") from None
            weight, scales, zeros = kind.empty(n, k, group, dtype, new)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales, self.zeros = parameter(scales), parameter(zeros)
        self.columns: nn.Parameter | None = None
        if format == "packed" or (kind is not None and kind.panel > 1):
            self.weight[-1:].zero_()  # including the padding rows: equal weights are equal tensors
        self.bias = parameter(new((n,), dtype) if bias else None)

    @classmethod
    def from_integers(
        cls,
        format: str,
        in_features: int,
        integers: Integers,
        columns: Tensor | None = None,
        bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """Make a layer of a weight that was quantized elsewhere, from existing tensors.

        Args:
            format: "int8" or "w8a16", "int4" or "w4a16", or a kind of block, also in panels.
            in_features: Columns of x, k.
            integers: The weight: [n, k] int8; [n, k / 2] uint8 for 4 bits; or blocks. The scales: [n] float32 for 8
                bits; [n, k / group] float32 or `dtype` for 4, with groups of 32, 64 or 128; None for blocks. The zeros:
                for 4 bits, shaped as scales; None: 0.
            columns: [k] int64: the weight is multiplied by x[..., columns]; None: by x.
            bias: Whether there is a bias, which the caller sets.
            dtype: The dtype of x, y and bias.

        Returns:
            The layer. It has no `load`.
        """
        n, device = integers.rows_of(FORMATS[format]), integers.weight.device
        linear = cls(in_features, 0, False, "dense", dtype, device)
        linear.out_features, linear.format = n, format
        for name, tensor in {**integers._asdict(), "columns": columns}.items():
            setattr(linear, name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
        if bias:
            memory = allocate(n, dtype=linear.dtype, device=device)
            linear.bias = nn.Parameter(memory, requires_grad=False)
        return linear

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute x [..., k] @ weight^T + bias: [..., n], in `out` (any row stride) if it is given."""
        ops = torch.ops.infini
        if self.columns is not None:
            x = take_columns(x, self.columns)
        if x.shape[-1] != self.in_features:  # the shape of a packed weight does not tell k
            raise ValueError(
                f"torch_infini.nn.Linear: x must have in_features columns, {self.in_features}, got {list(x.shape)}"
            )
        if self.format == "packed":
            packed = (x, self.weight, self.out_features, self.bias)
            return ops.linear_packed.default(*packed) if out is None else ops.linear_packed.out(*packed, out=out)
        if self.format != "dense":
            return FORMATS[self.format].product(x, self.integers, self.bias, True, out)
        dense = (x, self.weight, self.bias)
        return ops.linear.default(*dense) if out is None else ops.linear.out(*dense, out=out)

    def load(self, weight: Tensor, first_row: int = 0) -> None:
        """Copy `weight` [m, k], in full precision, to the m rows from first_row on, in this layer's format."""
        rows = slice(first_row, first_row + weight.shape[0])
        if self.format == "dense":
            self.weight[rows].copy_(weight)
            return
        weight = weight.detach().to(self.weight.device, self.dtype)
        if self.format == "packed":
            if first_row + weight.shape[0] > self.out_features:  # the last panel may have padding rows
                raise ValueError(
                    f"torch_infini.nn.Linear: load's rows must be below out_features, {self.out_features}, got "
                    f"{weight.shape[0]} from {first_row} on"
                )
            weight = weight if weight.stride(-1) == 1 else weight.contiguous()
            torch.ops.infini.pack_linear.default(self.weight, weight, first_row)
            return
        FORMATS[self.format].quantize(weight, self.integers, first_row)

    def dense(self, rows: slice = slice(None)) -> Tensor:
        """Return rows of the weight in full precision: a view of a dense weight, a copy of others."""
        if self.format == "dense":
            return self.weight[rows]
        first, end, _ = rows.indices(self.out_features)
        count = max(end - first, 0)
        if self.format == "packed":
            return unpack_linear(self.weight, count, self.in_features, first)
        weight = FORMATS[self.format].dequantize(self.integers, first, count, self.in_features, self.dtype)
        return weight if self.columns is None else torch.empty_like(weight).index_copy_(1, self.columns, weight)

    @property
    def integers(self) -> Integers:
        """The tensors of a quantized weight."""
        assert self.format in FORMATS
        return Integers(self.weight, self.scales, self.zeros)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        """Implement to(), cuda(), float() and the like; weights become dense if they cannot stay as they are."""
        if self.format == "packed":
            there = fn(self.weight.data[:0])
            stays = there.dtype == torch.bfloat16 and backing_type(there.device) == "cpu"
        else:
            is_block, empty = self.format in BLOCKS, self.weight.data[:0]
            blocks = served_on(fn(empty).device, self.format, self.integers) if is_block else None
            stays = not is_block or blocks is not None
            if blocks is not None:
                if fn(empty.new_empty(0, dtype=self.dtype)).dtype != self.dtype:
                    blocks = out_of_panels(*blocks)
                if blocks[0] != self.format:
                    self.format, self.weight = blocks[0], nn.Parameter(blocks[1].weight, requires_grad=False)
        if not stays:
            self.weight = nn.Parameter(self.dense(), requires_grad=False)
            self.format = "dense"
        nn.Module._apply(self, fn, recurse)
        return self

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.format}"


def fastest(weights: str, dtype: torch.dtype, device: torch.device | str) -> str:
    """Return the format of a model's layers for `weights`: "packed" for dense weights if faster, else the best format.

    Raises:
        ValueError: For an unknown name.
    """
    if weights not in ("dense", *names()):
        known = ", ".join(map(repr, ("dense", *names())))
        hint = ": python -m torch_infini quantize makes a folder of it" if str(weights).startswith("auto:") else ""
        raise ValueError(f"torch_infini.models: weights must be one of {known}, got {weights!r}{hint}")
    if weights != "dense":
        return best(weights, device).name
    packs = dtype == torch.bfloat16 and backing_type(device) == "cpu" and not library.emulates_cuda()
    return "packed" if packs and library.capability in MULTIPLIES_BFLOAT16 else "dense"


class Embedding(nn.Module):
    """y = weight[ids].

    Args:
        rows: Rows of the table: the size of the vocabulary.
        size: Columns of the table.
        dtype: The table's dtype.
        device: The table's device.
        tp_group: The group that shards the table by rows; None: the whole table is here.

    Attributes:
        format: "dense", or the kind of block of the weight (see use_blocks).
        dtype: The dtype of y.
        weight: [rows, size]; in a group this rank's rows, padded to the largest number of rows of any rank. In blocks
            [rows, size / elements, bytes] uint8, or panels of these.
    """

    def __init__(
        self,
        rows: int,
        size: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        tp_group: TPGroup | None = None,
    ) -> None:
        super().__init__()
        dtype = dtype or torch.get_default_dtype()
        self.rows, self.size, self.tp_group = rows, size, tp_group
        self.format, self.dtype = "dense", dtype
        self.first, self.here, most = (0, rows, rows) if tp_group is None else tp_group.shard_rows(rows)
        self.weight = nn.Parameter(allocate(most, size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids [...]: [..., size]."""
        if self.format != "dense":
            format = FORMATS[self.format]
            assert isinstance(format, BlockFormat)
            of_rows = ids.flatten(), self.weight, format.kind.number, self.dtype
            return torch.ops.infini.embedding_blocks.default(*of_rows).view(*ids.shape, self.size)
        y = torch.ops.infini.embedding.default(ids, self.weight[: self.here], self.first, self.rows)
        return y if self.tp_group is None else self.tp_group.all_reduce(y)

    def use_blocks(self, format: str, weight: nn.Parameter) -> None:
        """Take the whole table, without a group, in blocks [rows, size / elements, bytes] of a checkpoint.

        Args:
            format: The kind of block.
            weight: The blocks; a tied head may share them.
        """
        assert self.tp_group is None
        self.format, self.weight = format, weight

    def dense(self) -> Tensor:
        """Return the table in full precision: the weight itself, or a copy of one in blocks."""
        if self.format == "dense":
            return self.weight
        return FORMATS[self.format].dequantize(Integers(self.weight), 0, self.rows, self.size, self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Embedding:
        """Implement to(), cuda() and the like; blocks become dense on devices that have no kernels for them."""
        if self.format != "dense":
            blocks = served_on(fn(self.weight.data[:0]).device, self.format, Integers(self.weight))
            if blocks is None:
                self.weight, self.format = nn.Parameter(self.dense(), requires_grad=False), "dense"
            elif blocks[0] != self.format:
                self.format, self.weight = blocks[0], nn.Parameter(blocks[1].weight, requires_grad=False)
        self.dtype = fn(self.weight.data.new_empty(0, dtype=self.dtype)).dtype  # that of rows of blocks
        nn.Module._apply(self, fn, recurse)
        return self

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.size}" + ("" if self.format == "dense" else f", {self.format}")


def take_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Return x[..., columns] of x [..., k] by ops that recorded steps support. They copy rows, so transpose x twice."""
    ops = torch.ops.infini
    by_column = ops.rearrange.default(x.flatten(0, -2).t())
    return ops.rearrange.default(ops.embedding.default(columns, by_column).t()).view(x.shape)


def rows_of(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return x[rows] of x [tokens, size]; x if rows is None."""
    return x if rows is None else torch.ops.infini.embedding.default(rows, x)
