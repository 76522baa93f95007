"""Embeddings whose table stays in the blocks of a checkpoint, in rows or in panels.

A head that is tied to one multiplies by the same memory (quantized_linear.py).

A state_dict holds the dense table, as of a packed layer; where blocks are not read, the table becomes dense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...weights import FORMATS, BlockFormat, Integers, out_of_panels, served_on
from ..checks.probe import frozen, probe_module, random
from ..swap import PLAN, Unsupported, restore, swap
from .quantized import ReadOnly, Reformatted

TABLE = "weight_blocks"  # the buffer of the table
embedding_blocks = torch.ops.infini.embedding_blocks.default


class TablePlan(NamedTuple):
    """How a table is stored, and what the module makes of a row.

    Attributes:
        format: Of torch_infini.weights.
        dtype: Of rows.
        is_scaled: Whether rows are multiplied by the module's embed_scale, as Gemma's.
        is_shared: Whether a head has the same memory, and counts it.
    """

    format: str
    dtype: torch.dtype
    is_scaled: bool
    is_shared: bool


class TableWeight(ReadOnly):
    """The table of an embedding in blocks."""

    error = "torch_infini: the table of an embedding in blocks is a copy, which must not be written to"


class BlockEmbedding(Reformatted):
    """y = weight[ids], or that times embed_scale; `weight` is dequantized at each access."""

    infini_ops = "embedding_blocks"
    freed = ("weight",)
    unsaved = (TABLE,)
    num_embeddings: int
    embedding_dim: int

    @property
    def plan(self) -> TablePlan:
        plan: TablePlan = vars(self)[PLAN]
        return plan

    @property
    def integers(self) -> Integers:
        table = self._buffers[TABLE]
        assert table is not None
        return Integers(table)

    @property
    def weight(self) -> Tensor:
        """The table, [rows, columns] in the module's dtype: a new tensor at each access."""
        weight = self.rows()
        return weight if torch.compiler.is_compiling() else weight.as_subclass(TableWeight)

    def rows(self) -> Tensor:
        plan = self.plan
        return FORMATS[plan.format].dequantize(self.integers, 0, self.num_embeddings, self.embedding_dim, plan.dtype)

    def forward(self, input: Tensor) -> Tensor:
        plan: TablePlan = self.__dict__[PLAN]
        format, table = FORMATS[plan.format], self._buffers[TABLE]
        assert isinstance(format, BlockFormat)
        y = embedding_blocks(input.flatten(), table, format.kind.number, plan.dtype)
        return scaled(self, y, plan.is_scaled).view(*input.shape, self.embedding_dim)

    @property
    def weight_count(self) -> int:
        return 0 if self.plan.is_shared else self.num_embeddings * self.embedding_dim

    @property
    def weight_bytes(self) -> int:
        return 0 if self.plan.is_shared else self.integers.weight.nbytes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Implement `to`: rows in place of panels, or a dense table, where the others are not read."""
        plan, empty = self.plan, self.integers.weight[:0]
        blocks = served_on(fn(empty).device, plan.format, self.integers)
        if blocks is None:
            make_dense(self)
            return self._apply(fn, recurse)  # nn.Embedding's
        dtype = fn(empty.new_empty(0, dtype=plan.dtype)).dtype
        if dtype != plan.dtype:
            blocks = out_of_panels(*blocks)
        if blocks[0] != plan.format:
            self._buffers[TABLE] = blocks[1].weight
        vars(self)[PLAN] = plan._replace(format=blocks[0], dtype=dtype)
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.rows()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.plan.format}"


def scaled(module: nn.Module, y: Tensor, is_scaled: bool) -> Tensor:
    """Return rows as a module's forward does."""
    if not is_scaled:
        return y
    scale: Any = module.embed_scale
    return y * (scale.to(y.dtype) if isinstance(scale, Tensor) else scale)


def is_scaled(module: nn.Embedding) -> bool:
    """Return whether an embedding multiplies its rows by embed_scale.

    Raises:
        Unsupported: If its forward gives neither that nor the rows, or if it is not read alone.
    """
    if module.max_norm is not None:
        raise Unsupported("it renormalizes its rows")
    if type(module) is nn.Embedding:
        return False
    for dtype in (torch.float32, torch.bfloat16):
        table, ids = random(5, 8).to(dtype), torch.tensor([[4, 0, 3]], device="cpu")
        small: Any = probe_module(module, {"weight": frozen(table)})
        small._buffers.update({name: b for name, b in module._buffers.items() if b is not None and not b.is_meta})
        try:
            with torch.no_grad():
                got = small(ids)
        except Exception as error:
            raise Unsupported(f"its forward does not take token ids alone: {error}") from error
        ways = (False, hasattr(module, "embed_scale"))
        known = [one for one in ways if torch.equal(got, scaled(small, table[ids], one))]
        if not known:
            raise Unsupported("its forward gives neither the rows of its table nor these times embed_scale")
    return known[0]


def install(module: nn.Embedding, plan: TablePlan, table: Tensor) -> None:
    """Give an embedding its table in blocks, and free its weight; the module works after each step."""
    module.register_buffer(TABLE, table, persistent=False)
    swap(module, BlockEmbedding, plan)
    del module._parameters["weight"]


def make_dense(module: BlockEmbedding) -> None:
    """Turn an embedding in blocks into what it was, with the dequantized table."""
    weight = nn.Parameter(module.rows(), requires_grad=False)
    restore(module)
    del module._buffers[TABLE]
    module._non_persistent_buffers_set.discard(TABLE)
    module._parameters["weight"] = weight
