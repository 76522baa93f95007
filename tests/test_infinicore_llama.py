"""The example llama.cpp on infinicore::nn: its greedy tokens are those of transformers, with one rank and with two."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_infini._library import ROOT
from torch_infini.demo import MODEL
from torch_infini.testing import assert_likeliest, greedy_tokens, sums_of
from torch_infini.testing.checkpoints import random_model

EXAMPLE = Path(__file__).resolve().parent.parent / "csrc" / "example" / "llama.cpp"
PROMPT, NEW = [1, 15, 27, 200, 3, 90, 90, 7], 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled example."""
    binary, lib = tmp_path_factory.mktemp("example") / "llama", ROOT / "lib"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", f"-L{lib}"]
    libraries = ["-linfinicore_cpp_api", "-linfiniccl", "-linfinirt", "-pthread", f"-Wl,-rpath,{lib}"]
    run("c++", *flags, str(EXAMPLE), *libraries, "-o", str(binary))
    return binary


def run(*command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tokens(llama: Path, folder: Path, ranks: int, mode: str, prompt: list[int] | None = None) -> list[int]:
    """What the example makes of the prompt; the ranks have to agree."""
    ids = [str(token) for token in prompt or PROMPT]
    lines = run(str(llama), str(folder), str(ranks), "cpu", mode, str(NEW), *ids).splitlines()
    assert len(lines) == ranks and len(set(lines)) == 1, lines
    return [int(token) for token in lines[0].split()]


def saved(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "llama-wide-heads"])
def test_tokens_of_float32(name: str, llama: Path, tmp_path: Path) -> None:
    """Exactly those of generate; a recorded step and one that is not recorded give the same."""
    model = saved(random_model(name), tmp_path)
    for prompt in (PROMPT, [42]):
        made = greedy_tokens(model, torch.tensor([prompt]), max_new_tokens=NEW)
        expected = made[0, len(prompt) :].tolist()
        assert len(set(expected)) > 3, "a model that repeats itself tests little"
        for ranks in (1, 2):
            for mode in ("graph", "eager"):
                assert tokens(llama, tmp_path, ranks, mode, prompt) == expected


@pytest.mark.parametrize("name", ["demo", "llama", "llama-biases-tied"])
def test_tokens_of_bfloat16(name: str, llama: Path, tmp_path: Path) -> None:
    """Each is the likeliest by transformers' logits, as far as rounding tells."""
    if name == "demo":
        from transformers import AutoModelForCausalLM

        folder, model = Path(MODEL), AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    else:
        folder, model = tmp_path, saved(random_model(name, torch.bfloat16), tmp_path)
    for ranks in (1, 2):
        made = tokens(llama, folder, ranks, "graph")
        assert made == tokens(llama, folder, ranks, "eager")
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + made[:-1]])).logits[0, len(PROMPT) - 1 :]
        assert_likeliest(torch.tensor(made), logits, *sums_of(model.config))


def test_what_is_refused(llama: Path, tmp_path: Path) -> None:
    """One sentence, and no rank that waits for another."""

    def refused(folder: Path, ranks: int, *ids: str) -> str:
        command = [str(llama), str(folder), str(ranks), "cpu", "graph", "4", *ids]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        return done.stderr

    model = saved(random_model("llama"), tmp_path)
    assert "RANKS must divide the key heads" in refused(tmp_path, 3, "1")
    assert "cannot read" in refused(tmp_path / "none", 1, "1")
    assert str(model.config.vocab_size) in refused(tmp_path, 2, str(model.config.vocab_size))
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 12)
    assert "is no safetensors file" in refused(tmp_path, 1, "1")
    saved(random_model("llama", intermediate_size=100), tmp_path / "other")
    os.replace(tmp_path / "other" / "model.safetensors", tmp_path / "model.safetensors")
    said = refused(tmp_path, 2, "1")
    assert re.search(r"layers\.\d\.mlp\.\w+_proj\.weight must be loaded from shape \[.*96.*, got \[.*100", said), said
