"""Providers from outside a program: INFINI_PROVIDERS, what the commands show; and kernels of ntops and of Triton."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.provider_counts import drop_providers, infini, kernels
from torch_infini import ops
from torch_infini.__main__ import main
from torch_infini.ops import register_provider, use_provider

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    drop_providers()


@pytest.mark.parametrize("setting", ["silu=one", "silu@cpu=one", " rms_norm=x , silu=one,", "silu@cpu=one,silu@cuda=y"])
@pytest.mark.parametrize("early", [True, False])
def test_setting(setting: str, early: bool) -> None:
    """A provider that is registered is chosen, and one that will be as soon as it is."""
    x, before = torch.zeros(3), kernels("silu")
    if early:
        register_provider("silu", lambda x: x + 1, device="cpu", name="one")
    ops.choose_providers(setting)
    assert ("silu" in " ".join(ops.awaited_providers())) == (not early or "cuda" in setting)
    register_provider("silu", lambda x: x + 2, device="cpu", name="two")
    if not early:
        assert ops.chosen_providers() == []
        register_provider("silu", lambda x: x + 1, device="cpu", name="one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert infini.silu(x).tolist() == [1, 1, 1]
    use_provider("silu", "infini")
    assert infini.silu(x).tolist() == [0, 0, 0]
    assert kernels("silu") == before
    register_provider("silu", lambda x: x + 3, device="cuda", name="one")  # for each device
    assert [p.device for p in ops.chosen_providers()] == ([] if "@" in setting else ["cuda"])


def test_setting_without_a_provider() -> None:
    """Our kernels compute; the first call of any form warns, once; it is listed as missing."""
    register_provider("silu", lambda x: x + 1, device="cpu", name="one")
    ops.choose_providers("silu=oen")
    assert ops.awaited_providers() == ["silu=oen"]
    x = torch.zeros(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        infini.rms_norm(torch.ones(2, 3), torch.ones(3))
        assert not caught
        infini.silu_(x)
        assert infini.silu(x).tolist() == infini.silu.out(x, out=x).tolist() == [0, 0, 0]
    (warning,) = caught
    assert str(warning.message) == (
        "torch_infini: INFINI_PROVIDERS has silu=oen, but no such provider is registered (there is 'one' on cpu): "
        "torch_infini's own kernel computes silu"
    )


ONE_ENTRY = "must have one entry for an op, or one for each of its devices"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("silu", "INFINI_PROVIDERS must be op=name or op@device=name, with commas between, got 'silu'"),
        ("silu=", "INFINI_PROVIDERS must be op=name or op@device=name, with commas between, got 'silu='"),
        ("slu=a", "INFINI_PROVIDERS: op must be one that `python -m torch_infini ops` lists, got 'slu'"),
        ("silu@warp=a", "INFINI_PROVIDERS: device must be a type of device that torch knows, got 'warp'"),
        ("silu=a,silu=b", f"INFINI_PROVIDERS {ONE_ENTRY}, got 'silu=b' too"),
        ("silu@cpu=a,silu=b", f"INFINI_PROVIDERS {ONE_ENTRY}, got 'silu=b' too"),
        ("silu=a,silu@cpu=b", f"INFINI_PROVIDERS {ONE_ENTRY}, got 'silu@cpu=b' too"),
    ],
)
def test_bad_setting(setting: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        ops.choose_providers(setting)
    assert str(caught.value) == sentence
    assert ops.awaited_providers() == []


def test_commands_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> tuple[int, list[str]]:
        status = main([*arguments])
        return status, capsys.readouterr().out.splitlines()

    _, without = shown("ops")
    register_provider("silu", lambda x: x + 1, device="cpu", name="one")
    register_provider("silu", lambda x: torch.nn.functional.silu(x).contiguous(), device="cpu", name="right")
    use_provider("silu", "right")
    ops.choose_providers("relu=two")
    _, with_ = shown("ops")
    assert with_[0].split() == [*without[0].split()[:-1], "providers", "schema"]
    assert [re.split("  +", line)[-2:] for line in with_ if line.startswith("silu ")] == [
        ["one@cpu, right@cpu (in use)", "(Tensor x) -> Tensor"]
    ]
    facts = json.loads("\n".join(shown("env", "--json")[1]))
    assert (facts["providers"], facts["providers_missing"]) == (["silu on cpu by right"], ["relu=two"])
    status, lines = shown("doctor", "--ops", "silu", "--verbose")
    assert status == 1 and "ok      silu on cpu by right" in lines
    sentence = "nothing that this command imports registers relu=two: our kernels compute"
    assert f"FAILED  INFINI_PROVIDERS: {sentence}" in lines
    use_provider("silu", "one")
    assert any(line.startswith("FAILED  silu on cpu by one: ") for line in shown("doctor", "--ops", "silu")[1])


FAKE_NTOPS = """
def silu(input, inplace=False):
    return input
"""


def test_ntops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported when it is asked for and not before; for CUDA alone."""
    if importlib.util.find_spec("ntops"):
        pytest.skip("ntops is installed")
    none = "torch_infini.ops.use_provider: name must be 'infini' or a provider that is registered for"
    with pytest.raises(ValueError) as caught:
        use_provider("silu", "ntops")
    assert str(caught.value) == f"{none} silu, got 'ntops' (there is none; the package ntops is not installed)"
    ops.choose_providers("silu=ntops")
    assert ops.awaited_providers() == ["silu=ntops"]
    (tmp_path / "ntops").mkdir()
    (tmp_path / "ntops" / "__init__.py").write_text("")
    (tmp_path / "ntops" / "torch.py").write_text(FAKE_NTOPS)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert ops.providers() == [] and "ntops" not in sys.modules
        with pytest.raises(ValueError) as caught:
            use_provider("relu", "ntops")
        assert str(caught.value) == f"{none} relu, got 'ntops' (there is none)" and "ntops" not in sys.modules
        with pytest.raises(ValueError) as caught:
            use_provider("silu", "ntops", device="cpu")
        assert str(caught.value) == f"{none} silu on cpu, got 'ntops' (there is 'ntops' on cuda)"
        ops.choose_providers("silu=ntops")
        assert ops.awaited_providers() == []
        (provider,) = ops.chosen_providers()
        assert (provider.op, provider.device, provider.name) == ("silu", "cuda", "ntops")
        assert provider.fn is sys.modules["ntops.torch"].silu
        assert infini.silu(torch.zeros(2)).tolist() == [0, 0] and len(kernels("silu")) == 1
    finally:
        sys.modules.pop("ntops", None)
        sys.modules.pop("ntops.torch", None)


# ---- in a process of its own: what is read at import, and what torch does once in a process ----


def python(code: str, setting: str | None, **more: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
    environment.pop("INFINI_PROVIDERS", None)
    if setting is not None:
        environment["INFINI_PROVIDERS"] = setting
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)


PLUGIN = """
import torch, torch_infini
torch_infini.ops.register_provider("silu", lambda x: x + 1, device="cpu", name="one")
print(torch.ops.infini.silu(torch.zeros(3)).tolist())
"""


@pytest.mark.full
def test_variable() -> None:
    """Nothing is warned of, neither by us nor by torch of a kernel that is laid over another; the call is logged."""
    done = python(PLUGIN, "silu=one", INFINI_LOG="2")
    assert (done.stdout, done.stderr) == ("[1.0, 1.0, 1.0]\n", "infini::silu(x=float32[3])\n")
    done = python(PLUGIN, "silu=oen")
    assert (
        done.stdout == "[0.0, 0.0, 0.0]\n" and "UserWarning: torch_infini: INFINI_PROVIDERS has silu=oen" in done.stderr
    )
    done = python(PLUGIN, "silu")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: torch_infini: INFINI_PROVIDERS must be op=name or op@device=name, with commas between, got 'silu'"
    )


TRITON = """
import torch, torch_infini, triton
import triton.language as tl
from torch_infini.ops import register_provider, use_provider

launches = 0

@triton.jit
def silu_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside).to(tl.float32)
    tl.store(y + at, value / (1 + tl.exp(-value)), mask=inside)

@register_provider("silu", device="cpu", name="triton")
def silu(x):
    global launches
    launches += 1
    x = x.contiguous()
    y = torch.empty_like(x)
    silu_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y

x = torch.randn(7, 133)
ours = torch.ops.infini.silu(x)
with use_provider("silu", "triton"):
    torch.testing.assert_close(torch.ops.infini.silu(x), ours)
    torch.testing.assert_close(torch.ops.infini.silu(x.t()), ours.t().contiguous())
    torch.testing.assert_close(torch.compile(torch.ops.infini.silu, fullgraph=True, backend="aot_eager")(x), ours)
print("launches", launches)
"""


def test_triton(tmp_path: Path) -> None:
    """A Triton kernel, interpreted on the CPU."""
    pytest.importorskip("triton")
    script = tmp_path / "script.py"
    script.write_text(TRITON)
    done = python(f"import runpy; runpy.run_path({str(script)!r})", None, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["launches 3"]
