"""Experts that ranks share as wholes (enable_expert_parallel): tokens equal to those of one rank, what each rank holds,
experts in blocks that columns would cut, and what is said of models and calls that it does not fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from test_checkpoint_experts import written
from test_split import GREEDY, ROWS, SETTINGS, tokens_of
from torch_infini import LLM
from torch_infini.distributed import TPGroup
from torch_infini.distributed.rank_threads import on_ranks
from torch_infini.patch.layers.experts import Experts
from torch_infini.patch.paged.serve import load_served_model
from torch_infini.testing.causal_types import build

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]
# Rows; transposed, interleaved and with biases; a shared expert beside; groups of experts; squared ReLU without gate.
KINDS = ("qwen3_moe", "gpt_oss", "qwen2_moe", "deepseek_v3", "nemotron_h")


def load(folder: Path, tp_group: TPGroup | None = None, weights: str | None = None, whole: bool = True) -> Any:
    return load_served_model(folder, weights, None, "cpu", None, False, tp_group, whole and tp_group is not None)


def experts_of(served: Any) -> list[Experts]:
    return [module for module in served.model.modules() if isinstance(module, Experts)]


def assert_alike(folder: Path, size: int, weights: str | None = None) -> list[Any]:
    """The tokens of ranks are those of one; returns the ranks' models."""
    want = tokens_of(load(folder, None, weights))

    def work(tp_group: TPGroup) -> Any:
        model = load(folder, tp_group, weights)
        return model, tokens_of(model)

    results = on_ranks(size, work)
    for result in results:
        assert not isinstance(result, Exception), result
        assert result[1] == want
    return [model for model, _ in results]


@pytest.mark.full(beyond=2)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_rank(kind: str, tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path)
    whole = experts_of(load(tmp_path))
    for rank, model in enumerate(assert_alike(tmp_path, 2)):
        own = experts_of(model)
        assert len(own) == len(whole) > 0
        for part, all_of_them in zip(own, whole, strict=True):
            total, hidden, inner = all_of_them.sizes
            assert part.sizes == (total // 2, hidden, inner) and part.share == (rank * total // 2, total)
            first = part.share[0]
            assert torch.equal(part.rows("down_proj"), all_of_them.rows("down_proj")[first : first + total // 2])


def test_four_ranks(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    assert [experts_of(model)[0].sizes[0] for model in assert_alike(tmp_path, 4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_while_read(weights: str, tmp_path: Path) -> None:
    """The tokens of both ranks; an expert has the integers that it has on one rank, so its results are the same."""
    build("qwen3_moe").save_pretrained(tmp_path)
    results = on_ranks(2, lambda group: tokens_of(load(tmp_path, group, weights)))
    assert results[0] == results[1] and len(results[0]) == len(ROWS)
    one = experts_of(load(tmp_path, None, weights))
    parts = on_ranks(2, lambda group: [part.down_proj for part in experts_of(load(tmp_path, group, weights))])
    for whole, first, second in zip(one, *parts, strict=True):
        assert torch.equal(torch.cat((first, second)), whole.down_proj)


def test_blocks_that_columns_would_cut(tmp_path: Path) -> None:
    """gpt-oss in MXFP4 with 96 columns inside: 48 of each are no whole blocks, and whole experts are."""
    written(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["intermediate_size"] == 96
    for result in on_ranks(2, lambda group: load(tmp_path, group, whole=False)):
        assert "ranks must not cut the blocks of 32 numbers, got 48 columns of each" in str(result)
    assert_alike(tmp_path, 2)


def test_processes(tmp_path: Path) -> None:
    """By the arguments of LLM, with a rank that is another process."""
    build("qwen3_moe").save_pretrained(tmp_path)
    want = tokens_of(load(tmp_path))
    llm = LLM(tmp_path, tensor_parallel_size=2, enable_expert_parallel=True, **SETTINGS)
    model: Any = llm.engine.model
    assert [one.share for one in experts_of(model)][:1] == [(0, 4)]
    assert [list(output.outputs[0].token_ids) for output in llm.generate(ROWS, GREEDY)] == want


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("qwen3", "the model has no experts that are known here"),
        ("llama4_text", "model.layers.0.feed_forward.experts takes rows for all experts"),
        ("longcat_flash", "model.layers.0.mlp.experts is not computed by fused_experts"),
    ],
)
def test_models_that_it_does_not_fit(kind: str, why: str, tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path)
    for result in on_ranks(2, lambda group: load(tmp_path, group)):
        assert isinstance(result, ValueError) and why in str(result), result
        assert str(result).startswith("torch_infini.LLM: enable_expert_parallel must be left out for ")


def test_experts_that_ranks_do_not_divide(tmp_path: Path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path)
    for result in on_ranks(3, lambda group: load(tmp_path, group)):
        assert "must be a multiple of the ranks, 3, got 4" in str(result)


def test_arguments(tmp_path: Path) -> None:
    """One rank has all; a loaded model and one of our own layers are refused."""
    build("qwen3_moe").save_pretrained(tmp_path / "moe")
    build("llama").save_pretrained(tmp_path / "llama")
    alone = LLM(tmp_path / "moe", enable_expert_parallel=True, **SETTINGS)
    assert tokens_of(load(tmp_path / "moe")) == [
        list(output.outputs[0].token_ids) for output in alone.generate(ROWS, GREEDY)
    ]
    with pytest.raises(ValueError, match="enable_expert_parallel must be left out for a model without experts"):
        LLM(tmp_path / "llama", enable_expert_parallel=True, **SETTINGS)
    with pytest.raises(ValueError, match="enable_expert_parallel must be True or False, got 'no'"):
        LLM(tmp_path / "moe", enable_expert_parallel="no", **SETTINGS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="enable_expert_parallel must be left out for a model that is loaded"):
        LLM(build("qwen3_moe"), enable_expert_parallel=True, **SETTINGS)


def test_calls_beside_inference(tmp_path: Path) -> None:
    """The original's forward computes what the op does: with this rank's experts alone, the others' weights are 0."""
    build("qwen3_moe").save_pretrained(tmp_path)
    whole = experts_of(load(tmp_path))[0]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    index, weights = torch.tensor([[0, 1, 2], [3, 2, 1], [1, 0, 3], [2, 3, 0], [0, 3, 1]]), torch.rand(5, 3)

    parts = on_ranks(
        2, lambda group: experts_of(load(tmp_path, group))[0].forward_of_original(x.clone(), index, weights)
    )
    torch.testing.assert_close(parts[0] + parts[1], whole(x, index, weights), rtol=1e-5, atol=1e-6)
