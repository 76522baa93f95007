"""The example llama.cpp on infinicore::nn: its greedy tokens are those of transformers, with one rank and with two."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cpp_programs import EXAMPLES, compiled, run, started
from support.rounding import assert_likeliest, greedy_tokens, sums_of
from support.tiny_llama import tiny
from torch_infini.demo import MODEL

PROMPT, NEW = [1, 15, 27, 100, 3, 90, 90, 7], 20
MODELS: dict[str, dict[str, Any]] = {
    "grouped heads": {"seed": 3},
    "biases, tied": {"seed": 3, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "wide heads": {"seed": 1, "head_dim": 32, "num_key_value_heads": 4, "rope_theta": 500000.0},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled example."""
    return compiled(EXAMPLES / "llama.cpp", tmp_path_factory.mktemp("example"))


def tokens(llama: Path, folder: Path, ranks: int, mode: str, prompt: list[int] | None = None) -> list[int]:
    """What the example makes of the prompt; the ranks have to agree."""
    ids = [str(token) for token in prompt or PROMPT]
    lines = run(llama, folder, str(ranks), "cpu", mode, str(NEW), *ids).splitlines()
    assert len(lines) == ranks and len(set(lines)) == 1, lines
    return [int(token) for token in lines[0].split()]


def saved(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_float32(name: str, llama: Path, tmp_path: Path) -> None:
    """Exactly those of generate; a recorded step and one that is not recorded give the same."""
    model = saved(tiny(**MODELS[name]), tmp_path)
    for prompt in (PROMPT, [42]):
        ids = torch.tensor([prompt])
        made = greedy_tokens(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW)
        expected = made[0, len(prompt) :].tolist()
        assert len(set(expected)) > 3, "a model that repeats itself tests little"
        for ranks in (1, 2):
            for mode in ("graph", "eager"):
                assert tokens(llama, tmp_path, ranks, mode, prompt) == expected


@pytest.mark.parametrize("name", ["demo", *MODELS])
def test_tokens_of_bfloat16(name: str, llama: Path, tmp_path: Path) -> None:
    """Each is the likeliest by transformers' logits, as far as rounding tells."""
    if name == "demo":
        from transformers import AutoModelForCausalLM

        folder, model = Path(MODEL), AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    else:
        folder, model = tmp_path, saved(tiny(torch.bfloat16, **MODELS[name]), tmp_path)
    for ranks in (1, 2):
        made = tokens(llama, folder, ranks, "graph")
        assert made == tokens(llama, folder, ranks, "eager")
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + made[:-1]])).logits[0, len(PROMPT) - 1 :]
        assert_likeliest(torch.tensor(made), logits, *sums_of(model.config))


def test_what_is_refused(llama: Path, tmp_path: Path) -> None:
    """One sentence, and no rank that waits for another."""

    def refused(folder: Path, ranks: int, *ids: str) -> str:
        done = started(llama, folder, str(ranks), "cpu", "graph", "4", *ids)
        assert done.returncode == 1
        return done.stderr

    model = saved(tiny(), tmp_path)
    assert "RANKS must divide the key heads" in refused(tmp_path, 3, "1")
    assert "cannot read" in refused(tmp_path / "none", 1, "1")
    assert str(model.config.vocab_size) in refused(tmp_path, 2, str(model.config.vocab_size))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 12)
    assert "is no safetensors file" in refused(tmp_path, 1, "1")
    saved(tiny(intermediate_size=100), tmp_path / "other")
    os.replace(tmp_path / "other" / "model.safetensors", tmp_path / "model.safetensors")
    said = refused(tmp_path, 2, "1")
    assert re.search(r"layers\.\d\.mlp\.\w+_proj\.weight must be loaded from shape \[.*160.*, got \[.*100", said), said
