"""A third device, brought by a vendor's library that is built outside of the tree: tests/vendor_device.

docs/new-device.md describes it. No file of the tree is edited for it, nor built again. It serves the C interface, and
torch as the device infini.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torch_infini._core.library import PATH

ROOT = Path(__file__).resolve().parent.parent
VENDOR = ROOT / "tests" / "vendor_device"
VARIABLES = (("CXX", "g++"), ("CXXFLAGS", ""), ("LDFLAGS", ""))


def built(folder: Path, *flags: str) -> Path:
    """The vendor's library, compiled in a folder."""
    library = folder / "libinfini_qy.so"
    cxx, cxxflags, ldflags = (os.environ.get(name, default) for name, default in VARIABLES)
    command = [
        *shlex.split(f"{cxx} {cxxflags} -std=c++17 -O1 -Wall -Wextra -Werror -fPIC -shared"),
        *(f"-I{ROOT / 'csrc' / name}" for name in ("include", "common", "infiniop", "infinirt")),
        *(str(VENDOR / name) for name in ("backend.cpp", "rms_norm.cpp", "add.cpp")),
        *flags,
        *("-o", str(library), "-Wl,-z,defs", f"-L{PATH.parent}", "-linfiniop", "-linfinirt"),
        *shlex.split(ldflags),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("vendor"))


def run(script: Path | str, *arguments: str, **environment: str) -> str:
    """What a script prints, in a process of its own: a device that is registered stays."""
    source = [str(script)] if isinstance(script, Path) else ["-c", script]
    done = subprocess.run(
        [sys.executable, *source, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.full
def test_c_interface(library: Path) -> None:
    """The library brings a device and two ops."""
    assert run(VENDOR / "use.py", str(library)) == "fine"


@pytest.mark.full
def test_device_infini(library: Path) -> None:
    """The variable makes of it a device of torch, without a line of C++ for torch."""
    assert run(VENDOR / "use_torch.py", TORCH_INFINI_DEVICE=str(library)) == "fine"


REFUSED = """
import torch_infini.device
try:
    torch_infini.device.enable()
except (ValueError, RuntimeError) as error:
    print(type(error).__name__, error)
"""


@pytest.mark.full
def test_refused(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no vendor's library, has no device, or memory that the host cannot use."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # an installed torch_infini raises at `import torch`
    here = "torch_infini.device.enable: TORCH_INFINI_DEVICE must be"
    assert run(REFUSED, TORCH_INFINI_DEVICE="gpu").startswith(f"ValueError {here} cpu or cuda, or a vendor's device")
    missing = run(REFUSED, TORCH_INFINI_DEVICE=str(tmp_path / "none.so"))
    assert missing.startswith(f"ValueError {here} a library that exists, got")
    assert run(REFUSED, TORCH_INFINI_DEVICE="ascend").startswith(f"RuntimeError {here} a device of this process, got")
    none = run(REFUSED, TORCH_INFINI_DEVICE=str(PATH.parent / "libinfiniccl.so"))
    assert none.startswith(f"ValueError {here} a library that registers a backend") and none.endswith("brings none")
    far = built(tmp_path, "-DQY_MEMORY_IS_FAR")
    assert "a device whose memory the host can use" in run(REFUSED, TORCH_INFINI_DEVICE=str(far))
