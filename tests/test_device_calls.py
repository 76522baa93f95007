"""The 81 everyday calls of torch_infini.device.calls, and the command that runs and prints them."""

from __future__ import annotations

import re

import pytest
import torch

from torch_infini.__main__ import main
from torch_infini.device.calls import CALLS, ExampleCall, checks

Output = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("infini")


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    note = CALLS[name].function()
    assert note is None or name == "safetensors", note


def test_there_are_81_calls() -> None:
    assert len(CALLS) == 81
    assert all(re.fullmatch(r".*\.", call.summary) for call in CALLS.values()), "a sentence for each"


def test_command(capsys: Output) -> None:
    assert main(["device", "--backing", "cpu", "--calls", "constants,backward"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[:-1]] == [
        ["ok", "factories", "constants"],
        ["ok", "autograd", "backward"],
    ]
    assert lines[-1] == "device infini on cpu: 2 of 2"


def test_command_lists(capsys: Output) -> None:
    assert main(["device", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 81 and lines[0].startswith("factories")


def test_command_reports_failures(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        """Compare a tensor with another."""
        checks.same_tensor(torch.zeros(2, device="infini"), torch.tensor([0.0, -0.0]))

    def refused() -> str:
        """Call a library that refuses."""
        return "the library refuses"

    monkeypatch.setitem(CALLS, "wrong", ExampleCall("area", "wrong", wrong))
    monkeypatch.setitem(CALLS, "refused", ExampleCall("area", "refused", refused))
    assert main(["device", "--calls", "constants,wrong,refused"]) == 1
    out = capsys.readouterr().out
    assert (
        "FAILED  area           wrong                 Compare a tensor with another.\n    CallError: the elements"
        in out
    )
    assert "    the library refuses\n" in out and out.endswith("device infini on cpu: 2 of 3\n")


def test_command_refuses_unknown_calls(capsys: Output) -> None:
    assert main(["device", "--calls", "constant"]) == 2
    sentence = "there is no call 'constant'; `python -m torch_infini device --list` prints them"
    assert capsys.readouterr().err == f"torch_infini device: {sentence}\n"


@pytest.mark.parametrize(
    ("got", "want", "sentence"),
    [
        (lambda: torch.zeros(2), torch.zeros(2), "must be on infini, got cpu"),
        (lambda: torch.zeros(2, device="infini").double(), torch.zeros(2), "the dtype must be torch.float32"),
        (lambda: torch.zeros(2, 1, device="infini"), torch.zeros(2), "the shape must be [2], got [2, 1]"),
        (lambda: torch.zeros(2, 3, device="infini").t(), torch.zeros(3, 2), "the strides must be (2, 1), got (1, 3)"),
        (lambda: torch.ones(2, device="infini"), torch.zeros(2), "the elements must be the CPU's"),
    ],
)
def test_checks_find_differences(got: object, want: torch.Tensor, sentence: str) -> None:
    assert callable(got)
    with pytest.raises(checks.CallError, match=re.escape(sentence)):
        checks.same([got()], [want])


def test_refused_needs_the_exception() -> None:
    with pytest.raises(checks.CallError, match="nothing came"):
        checks.refused(ValueError, "text", lambda: None)
    with pytest.raises(checks.CallError, match="the message must have 'text'"):
        checks.refused(ValueError, "text", lambda: int("x"))
