""".ci/gpu_samples.py, which compute-sanitizer runs: one sample of each op that has a CUDA kernel."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from torch_infini.testing import cuda_device
from torch_infini.testing.ops import all_op_infos

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "gpu_samples.py"
pytestmark = pytest.mark.skipif(cuda_device() is None, reason="no GPU, and the libraries are not the emulated ones")


@pytest.fixture(scope="module")
def samples() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT), run_name="gpu_samples")


def test_all_ops_run(samples: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert samples["main"]([]) == 0, capsys.readouterr().out
    *ran, last = capsys.readouterr().out.splitlines()
    names = [line.removeprefix("ran     ").split(",")[0] for line in ran]
    assert sorted(names) == sorted(spec.name for spec in all_op_infos() if "cuda" in spec.devices)
    assert names[:2] == ["attention", "paged_attention"]
    assert last == f"gpu_samples: {len(names)} of {len(names)} ops ran, 0 failed"


def test_an_op_that_fails_stops_no_other(
    samples: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = samples["call"]

    def fails(spec: Any, sample: Any) -> Any:
        if spec.name == "rms_norm":
            raise RuntimeError("misaligned address")
        return call(spec, sample)

    monkeypatch.setitem(samples["main"].__globals__, "call", fails)
    assert samples["main"](["--ops", "silu,rms_norm"]) == 1
    out = capsys.readouterr().out
    assert "FAILED  rms_norm, " in out and "ran     silu, " in out
    assert out.endswith("gpu_samples: 2 of 2 ops ran, 1 failed\n")


def test_time_is_up(samples: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert samples["main"](["--ops", "silu,rms_norm", "--seconds", "0"]) == 1
    assert capsys.readouterr().out == "gpu_samples: 0 of 2 ops ran, 0 failed; the time was up before rms_norm, silu\n"


def test_samples_are_neither_empty_nor_large(samples: dict[str, Any]) -> None:
    for spec in all_op_infos():
        if "cuda" in spec.devices:
            _, sample = samples["chosen_sample"](spec)
            assert 0 < samples["elements"](sample) <= samples["MOST_ELEMENTS"], (spec.name, sample.name)
