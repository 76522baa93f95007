"""Models and the engine on CUDA, or its emulation: the tokens of transformers on the CPU, and rows that fail alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.emulated_graphs import captured_by_emulation
from support.engines import finish
from torch_infini._core.library import emulates_cuda
from torch_infini.engine import Engine, EngineConfig, SamplingParams, decode
from torch_infini.models import Llama
from torch_infini.testing import cuda_device
from torch_infini.testing.checkpoints import SMALL, random_model

pytestmark = pytest.mark.skipif(cuda_device() is None, reason="neither a GPU nor its emulation")
TOKENS = 12


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(8, SMALL["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("name", ["llama-biases-tied", "mistral", "qwen3"])
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs: Any = random_model(name)
    theirs.save_pretrained(tmp_path)
    rows = prompts(3, 40, 33)
    rows.append(rows[1][:32] + rows[0])
    want = []
    for row in rows:
        ids = torch.tensor([row])
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        want.append(out[0, len(row) :].tolist())
    model = Llama.from_pretrained(tmp_path, device=cuda_device())
    for settings in ({"chunk_size": 32}, {"block_size": 16, "chunk_size": 16, "max_num_batched_tokens": 16}):
        engine = Engine(model, config=EngineConfig(max_model_len=64, **settings))
        ids_ = [engine.add(row, SamplingParams.greedy(max_tokens=TOKENS)) for row in rows[:3]]
        outputs = finish(engine)
        ids_.append(engine.add(rows[3], SamplingParams.greedy(max_tokens=TOKENS)))
        outputs |= finish(engine)
        assert [outputs[id].token_ids for id in ids_] == want
        assert outputs[ids_[3]].num_cached_tokens == 32


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integer_weights_in_half_precision(weights: Any, tmp_path: Path) -> None:
    """Tokens do not depend on how many others are generated; the logits are near those of the weights as they were."""
    random_model("llama").save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path, weights, torch.bfloat16, cuda_device())
    (row, other) = prompts(20, 9)
    params = SamplingParams(seed=1, max_tokens=TOKENS, logprobs=0)
    tokens = []
    for rows in ([row], [row, other]):
        engine = Engine(model, config=EngineConfig(max_model_len=64))
        ids = [engine.add(r, params) for r in rows]
        tokens.append(finish(engine)[ids[0]].token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps that are captured once and replayed give the tokens of steps that are computed op by op.

    On a GPU in torch's graphs, else in those of the emulated runtime, which replay kernels of ours alone.
    """
    random_model("llama").save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path, dtype=dtype, device=cuda_device())
    captures: list[int] = []

    def capture(step: Any) -> Any:
        captures.append(1)
        replay = captured_by_emulation(step)[1]
        replay()
        return replay

    if emulates_cuda():
        monkeypatch.setattr(decode, "recorder", lambda device: capture)
    results = []
    for record in (False, True):
        engine = Engine(model, config=EngineConfig(max_model_len=64, enforce_eager=not record))
        # One, then several requests: steps of other numbers of sequences come and go, and come again.
        outputs = {}
        ids = [engine.add(row, SamplingParams.greedy(max_tokens=4 + 3 * i)) for i, row in enumerate(prompts(20, 3, 33))]
        outputs |= finish(engine)
        ids += [engine.add(row, SamplingParams.greedy(max_tokens=TOKENS)) for row in prompts(5, 18)]
        outputs |= finish(engine)
        results.append([outputs[id].token_ids for id in ids])
    assert results[0] == results[1]
    if emulates_cuda():
        assert len(captures) == 3  # of one, two and three sequences


def test_nan_logits_end_one_request(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    model = Llama.from_pretrained(tmp_path, device=cuda_device())
    model.embed.weight.data[7] = torch.nan
    engine = Engine(model, config=EngineConfig(max_model_len=64))
    (row,) = prompts(20)
    no_nan = SamplingParams.greedy(max_tokens=TOKENS, logit_bias={7: -torch.inf})
    good, bad = engine.add(row, no_nan), engine.add([*row, 7], SamplingParams.greedy(max_tokens=TOKENS))
    outputs = finish(engine)
    assert outputs[bad].outputs[0].finish_reason == "error"
    assert len(outputs[good].token_ids) == TOKENS
