"""DecodeSteps: recorded steps of any batch size compute what the model does, while the memory that they share grows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_infini.engine.decode import MAX_STEPS, DecodeSteps
from torch_infini.models import Llama
from torch_infini.nn import Batch
from torch_infini.testing.checkpoints import SMALL, random_model

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCKS, BLOCK = 40, 4


def model_of(folder: Path) -> Llama:
    random_model("qwen3").save_pretrained(folder)
    return Llama.from_pretrained(folder, progress=False)


def random_batch(rows: int, blocks: int, generator: torch.Generator) -> Batch:
    """One new token for each of some sequences, each at the end of a random number of keys; tables of all blocks."""
    tables = torch.randperm(BLOCKS, generator=generator)[: rows * blocks].view(rows, blocks)
    lengths = torch.randint(1, blocks * BLOCK + 1, (rows,), generator=generator)
    at = lengths - 1
    slots = tables[torch.arange(rows), at // BLOCK] * BLOCK + at % BLOCK
    tokens = torch.randint(SMALL["vocab_size"], (rows,), generator=generator)
    return Batch(tokens, at, slots, tables, lengths)


@pytest.mark.parametrize("record", [True, False])
@torch.no_grad()
def test_steps_while_memory_grows(record: bool, tmp_path: Path) -> None:
    """Steps that were recorded before the memory was replaced, wide tables beside narrow ones; bit for bit."""
    model, generator = model_of(tmp_path), torch.Generator().manual_seed(0)
    cache = model.new_cache(BLOCKS, BLOCK)
    for tensor in (cache.keys, cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    steps = DecodeSteps(model, cache, record=record)
    made = set()
    for rows, blocks in 3 * ((1, 1), (2, 2), (5, 3), (2, 2), (3, 8), (1, 1), (5, 3), (2, 1)):
        batch = random_batch(rows, blocks, generator)
        want = model(batch, cache)
        step = steps.step(rows, blocks)
        made.add(step)
        step.inputs.copy_(torch.stack((batch.tokens, batch.positions, batch.slot_mapping, batch.seq_lens)))
        step.tables.copy_(batch.block_tables)
        assert torch.equal(step.run(), want), (rows, blocks)
    assert len(made) == 5


@torch.no_grad()
def test_memory_is_shared(tmp_path: Path) -> None:
    """Steps of one memory have their logits in the same place; the least recently used are dropped."""
    model = model_of(tmp_path)
    steps = DecodeSteps(model, model.new_cache(BLOCKS, BLOCK), max_rows=MAX_STEPS + 1, max_blocks=2)
    first = steps.step(1, 2)
    assert {steps.step(rows, 2).logits.data_ptr() for rows in range(2, MAX_STEPS + 1)} == {first.logits.data_ptr()}
    assert steps.step(1, 2) is first
    second = steps.step(2, 2)
    assert steps.step(MAX_STEPS + 1, 2).logits.data_ptr() == first.logits.data_ptr()
    assert steps.step(1, 2) is first
    assert steps.step(2, 2) is second
    assert len(steps._steps) == MAX_STEPS
