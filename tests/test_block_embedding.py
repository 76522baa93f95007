"""Embeddings that stay in the blocks of a GGUF file: their values, and the memory that a tied head shares.

And what becomes of them when a model is saved, moved, copied or compiled.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("gguf")

import torch_infini
from support.gguf_architectures import write
from torch_infini import LLM, SamplingParams
from torch_infini.distributed.rank_threads import on_ranks
from torch_infini.distributed.tensor_parallel import TPGroup
from torch_infini.patch import save_patched
from torch_infini.patch.files import foreign
from torch_infini.patch.layers.block_embedding import BlockEmbedding, is_scaled
from torch_infini.patch.layers.quantized_linear import QuantizedLinear
from torch_infini.patch.paged.model import step_bytes
from torch_infini.patch.swap import Unsupported

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 256, "intermediate_size": 256}
IDS = torch.arange(3, 40)[None]


def table_of(model: Any) -> Any:
    return model.get_input_embeddings()


def blocks_of(module: Any) -> torch.Tensor:
    blocks: torch.Tensor = module._buffers["weight_blocks" if isinstance(module, BlockEmbedding) else "weight_integers"]
    return blocks


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return result.float()


@pytest.fixture(params=["gemma2", "phi3"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """(a file, its dense model): with a tied head and scaled rows; with a head of its own."""
    path = tmp_path / "model.gguf"
    return path, write(path, request.param, lambda key: "Q6_K" if "embed" in key else "Q8_0", **SIZES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values(dtype: torch.dtype, written: tuple[Path, Any]) -> None:
    path, dense = written
    model = torch_infini.load(path, dtype)
    table, head = table_of(model), model.get_output_embeddings()
    assert isinstance(table, BlockEmbedding) and isinstance(head, QuantizedLinear)
    expected = table_of(dense).weight
    assert torch.equal(table.weight.float(), expected.to(dtype).float())
    ids = torch.tensor([[5, 0], [119, 5]])
    with torch.no_grad():
        want = table_of(dense.to(dtype))(ids)
    assert torch.equal(table(ids), want) and table(ids.int()).dtype == dtype
    assert table(ids[:0]).shape == (0, 2, 256)
    is_tied = dense.config.tie_word_embeddings
    assert (blocks_of(head) is blocks_of(table)) == is_tied
    assert "weight" not in table._parameters and "weight" not in head._parameters


def test_float32_is_exact_and_served(written: tuple[Path, Any]) -> None:
    path, dense = written
    model = torch_infini.load(path, torch.float32)
    expected = logits(dense)
    assert float((logits(model) - expected).abs().max() / expected.abs().max()) <= 1e-5
    llm = LLM(path, dtype="float32", block_size=4, chunk_size=8, cache_blocks=40, progress=False)
    (output,) = llm.generate([IDS[0, :20].tolist()], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    tokens = list(output.outputs[0].token_ids)
    with torch.no_grad():
        scores = dense(input_ids=torch.tensor([IDS[0, :20].tolist() + tokens]), use_cache=False).logits
    assert tokens == scores[0, 19:-1].argmax(-1).tolist()


def test_ranks(written: tuple[Path, Any]) -> None:
    """Each has the whole table in blocks, and its rows of a tied head in blocks of their own."""
    path, dense = written
    expected = logits(dense)

    def work(tp_group: TPGroup) -> Any:
        model = foreign.load(path, torch.float32, tp_group=tp_group)
        return model, logits(model)

    for result in on_ranks(2, work):
        assert not isinstance(result, Exception), result
        model, found = result
        assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5
        table, head = table_of(model), model.get_output_embeddings()
        assert isinstance(table, BlockEmbedding) and isinstance(head, QuantizedLinear)
        assert not table.plan.is_shared
        if dense.config.tie_word_embeddings:
            assert 2 * blocks_of(head).nbytes == blocks_of(table).nbytes
    settings = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    alone, shared = (
        LLM(path, dtype="float32", tensor_parallel_size=size, cache_blocks=40, block_size=4, progress=False)
        for size in (1, 2)
    )
    prompt = IDS[0, :20].tolist()
    first, second = (llm.generate([prompt], settings)[0].outputs[0].token_ids for llm in (alone, shared))
    assert list(first) == list(second)


def test_bytes(written: tuple[Path, Any]) -> None:
    """The table's blocks once; a step reads them as the head, or a row of them."""
    path, dense = written
    model = torch_infini.load(path, torch.bfloat16)
    table, rows = blocks_of(table_of(model)), dense.config.vocab_size
    assert table.nbytes == rows * 210
    held = sum({id(b): b.nbytes for b in (*model.buffers(), *model.parameters())}.values())
    # All matrices are in Q8_0 but for this one; norms are small.
    others = sum(p.numel() for name, p in dense.named_parameters() if p.dim() > 1 and "embed" not in name)
    assert held <= table.nbytes + others * 34 / 32 * 1.02 + (1 << 16)
    assert step_bytes(model) == held - (0 if dense.config.tie_word_embeddings else table.nbytes)


def test_saved_dense(written: tuple[Path, Any], tmp_path: Path) -> None:
    path, dense = written
    model = torch_infini.load(path, torch.float32)
    state = model.state_dict()
    name = next(key for key, one in model.named_modules() if one is table_of(model))
    assert torch.equal(state[f"{name}.weight"], table_of(dense).weight) and f"{name}.weight_blocks" not in state
    save_patched(model, tmp_path / "saved")
    again = torch_infini.load(tmp_path / "saved")
    assert type(table_of(again)).__mro__[1] is not BlockEmbedding
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-5, atol=1e-5)


def test_other_dtypes_and_devices(written: tuple[Path, Any]) -> None:
    path, _ = written
    model = torch_infini.load(path, torch.bfloat16)
    values = table_of(model).weight.clone()
    before = logits(model)
    model.float()
    table = table_of(model)
    assert isinstance(table, BlockEmbedding) and table.plan.dtype == torch.float32
    assert not table.plan.format.endswith("_panels") and table(IDS).dtype == torch.float32
    torch.testing.assert_close(table.weight.bfloat16(), values, rtol=0, atol=0)
    assert float((logits(model) - before).norm() / before.norm()) < 0.05
    model.to("meta")
    assert not isinstance(table_of(model), BlockEmbedding) and table_of(model).weight.is_meta


def test_copies(written: tuple[Path, Any]) -> None:
    path, _ = written
    model = torch_infini.load(path, torch.float32)
    expected = logits(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(table_of(again), BlockEmbedding)
        assert torch.equal(logits(again), expected)


def test_writes_are_refused(written: tuple[Path, Any]) -> None:
    path, _ = written
    table = table_of(torch_infini.load(path, torch.float32))
    with pytest.raises(ValueError, match="the table of an embedding in blocks is a copy, which must not be written to"):
        table.weight.zero_()


def test_hooks(written: tuple[Path, Any]) -> None:
    """Of the embedding: they see ids and rows."""
    path, _ = written
    model = torch_infini.load(path, torch.float32)
    seen: list[Any] = []
    handle = table_of(model).register_forward_hook(lambda module, args, y: seen.append((args[0], y)))
    logits(model)
    handle.remove()
    ((ids, rows),) = seen
    assert torch.equal(ids, IDS) and rows.shape == (1, IDS.shape[1], 256)


@pytest.mark.full(beyond=0)
def test_compiled(written: tuple[Path, Any], no_graphs_left: None) -> None:
    path, _ = written
    model = torch_infini.load(path, torch.float32)
    expected = logits(model)
    torch.testing.assert_close(
        logits(torch.compile(model, backend="infini", fullgraph=True)), expected, rtol=1e-4, atol=1e-4
    )


class Shifted(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Placed(nn.Embedding):
    def forward(self, input: torch.Tensor, place: int) -> torch.Tensor:
        return super().forward(input + place)


class Scaled(nn.Embedding):
    embed_scale = 3.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.embed_scale


def test_forwards() -> None:
    assert not is_scaled(nn.Embedding(5, 8)) and is_scaled(Scaled(5, 8))
    for module, why in (
        (Shifted(5, 8), "its forward gives neither the rows of its table nor these times embed_scale"),
        (Placed(5, 8), "its forward does not take token ids alone"),
        (nn.Embedding(5, 8, max_norm=1.0), "it renormalizes its rows"),
    ):
        with pytest.raises(Unsupported, match=why):
            is_scaled(module)
