"""Progress bars of loading, quantizing and generate calls: on a terminal total, rate and rest, elsewhere nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_infini
from support.checkpoint_writers import CASES, write_folder
from torch_infini import LLM, SamplingParams, patch_model
from torch_infini._core import progress
from torch_infini.models import Llama, checkpoint
from torch_infini.testing.checkpoints import random_model

pytest.importorskip("tqdm")
pytestmark = pytest.mark.usefixtures("one_thread")
PARAMS = SamplingParams.greedy(max_tokens=4)
MODULES = ("torch_infini.patch.apply", "torch_infini.patch.budget", "torch_infini.patch.files.foreign")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that lets stderr be a terminal and returns what came since its last call; bars appear at once."""
    import importlib

    for name in MODULES:
        monkeypatch.setattr(importlib.import_module(name), "DELAY", 0.0)

    def read() -> str:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # pytest has another stderr while fixtures are made
        return capsys.readouterr().err

    return read


def last_bar(shown: str, what: str) -> str:
    """Return the last state of the bar of this name."""
    return [part for part in re.split(r"[\r\n]", shown) if part.startswith(f"{what}:")][-1]


def test_loading(tmp_path: Path, terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece that is there counts once; the total is that of all tensors, and a rate and a rest are shown."""
    model = random_model("llama", vocab_size=20_000)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(checkpoint, "_PIECE", 500_000)
    terminal()
    Llama.from_pretrained(tmp_path)
    bar = last_bar(terminal(), "loading")
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert "100%" in bar and bar.count(f"{total / 1e6:.1f}M") == 2, bar
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d, .*B/s\]", bar), bar
    Llama.from_pretrained(tmp_path, progress=False)
    assert terminal() == ""


@pytest.mark.parametrize("kind", ["awq", "gptq-8-groups", "fp8"])
def test_loading_of_other_formats(kind: str, tmp_path: Path, terminal: Any) -> None:
    """By the engine and as a model of transformers: the bar ends at the sum of all sizes."""
    write_folder(tmp_path, CASES[kind])
    terminal()
    for load in (lambda: LLM(tmp_path), lambda: torch_infini.load(tmp_path)):
        load()
        bar = last_bar(terminal(), "loading")
        assert "100%" in bar and re.search(r"(\S+)/\1 \[", bar), bar


def test_quantizing(terminal: Any) -> None:
    """The layers' bytes; for auto:BITS first the groups that are measured."""
    terminal()
    for weights, bars in (("int8", ["quantizing"]), ("auto:6", ["measuring", "quantizing"])):
        patch_model(random_model("llama"), weights=weights)
        shown = terminal()
        for what in bars:
            bar = last_bar(shown, what)
            assert "100%" in bar and re.search(r"(\S+)/\1 \[", bar), bar
        assert ("measuring" in shown) == ("measuring" in bars)
    patch_model(random_model("llama"))
    assert terminal() == ""


def test_generate(tmp_path: Path, terminal: Any) -> None:
    """A bar for several prompts, or where it is asked for; none where it is not."""
    random_model("llama").save_pretrained(tmp_path)
    llm = LLM(tmp_path, progress=False)
    terminal()
    for prompts, use_tqdm, expected in (
        ([[1, 2], [3]], None, "2/2"),
        ([[1, 2]], None, ""),
        ([[1, 2]], True, "1/1"),
        ([[1, 2], [3]], False, ""),
    ):
        llm.generate(prompts, PARAMS, use_tqdm)
        shown = terminal()
        assert expected in last_bar(shown, "prompts") if expected else shown == ""


def test_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing, unless loading is asked to."""
    random_model("llama").save_pretrained(tmp_path)
    capsys.readouterr()
    llm = LLM(tmp_path)
    llm.generate([[1, 2], [3]], PARAMS, True)
    patch_model(random_model("llama"), weights="int8")
    assert capsys.readouterr().err == ""
    LLM(tmp_path, progress=True)
    assert "loading" in capsys.readouterr().err


def test_short_work_shows_nothing(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_infini.patch import apply

    monkeypatch.setattr(apply, "DELAY", 60.0)
    terminal()
    patch_model(random_model("llama"), weights="int8")
    assert terminal() == ""


def test_track(terminal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Items come through unchanged, also with too few sizes, an exception, and without tqdm."""
    terminal()
    assert list(progress.track("abc", "x", [1, 1])) == ["a", "b", "c"]
    assert "2/2" in last_bar(terminal(), "x")
    with pytest.raises(ZeroDivisionError):
        progress.finish(progress.track((1 // n for n in (1, 0)), "x", [1, 1]))
    terminal()
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert list(progress.track(torch.arange(3).tolist(), "x", [1] * 3)) == [0, 1, 2]
    assert terminal() == ""
