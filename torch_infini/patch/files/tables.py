"""Tables of embeddings that stay in the blocks of a checkpoint while a model is read: which, and their installation.

A head that is tied to one becomes a quantized layer with the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ...checkpoints import Checkpoint, LinearWeight, Target
from ...weights import BLOCKS
from ..layers import block_embedding
from ..layers.quantized_linear import QuantizedLinear, install_weight, integers_of
from ..ranks.cut import part_of
from ..swap import Unsupported


class Table(NamedTuple):
    """An embedding whose table stays in blocks.

    Attributes:
        module: The embedding, on meta.
        heads: The head that is tied to it, by name; at most one.
        is_scaled: As block_embedding's.
    """

    module: nn.Embedding
    heads: Mapping[str, nn.Linear]
    is_scaled: bool


def tables_in_blocks(
    model: PreTrainedModel, checkpoint: Checkpoint, modules: Mapping[str, nn.Module]
) -> dict[str, Table]:
    """Return the tables among the modules that a GGUF file has in blocks, by their names.

    Layers of folders may be in integers of other formats, for which no embedding has an op: their tables are dense.
    """
    if not checkpoint.path.is_file():
        return {}
    target = Target.of(model.dtype, torch.device("cpu"), checkpoint.activations)
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    found = {}
    for name, module in modules.items():
        if not isinstance(module, nn.Embedding) or not target.prefers_blocks or f"{name}.weight" in tied:
            continue
        users = [key.removesuffix(".weight") for key, source in tied.items() if source == f"{name}.weight"]
        heads = {key: one for key in users if type(one := model.get_submodule(key)) is nn.Linear}
        if len(heads) == len(users) <= 1:
            with suppress(Unsupported):
                found[name] = Table(module, heads, block_embedding.is_scaled(module))
    return found


def put_table(model: PreTrainedModel, table: Table, weights: list[LinearWeight | None]) -> None:
    """Give an embedding, and the head that is tied to it, the weight of a checkpoint.

    A rank's part of a head has rows of its own.
    """
    (weight,) = weights
    assert weight is not None and weight.kind in BLOCKS
    blocks = weight.weight.clone(memory_format=torch.contiguous_format)  # out of the mapped file
    format, memory, is_shared = weight.kind, blocks, False
    for name, head in table.heads.items():
        part = part_of(head)
        own = blocks if part is None else torch.cat([blocks[rows.span] for rows in part.rows])
        install_weight(head, weight._replace(weight=own), model.dtype)  # which may lay the blocks out in panels
        quantized: Any = head
        assert isinstance(quantized, QuantizedLinear)
        if part is None:
            format, memory, is_shared = quantized.plan.format, integers_of(quantized._buffers).weight, True
        del model.all_tied_weights_keys[f"{name}.weight"]
    plan = block_embedding.TablePlan(format, model.dtype, table.is_scaled, is_shared)
    block_embedding.install(table.module, plan, memory)
