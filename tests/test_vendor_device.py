"""A third device, brought by a vendor's library that is built outside of the tree: tests/vendor_device.

CONTRIBUTING.md, "Bring up a device", describes it. No file of the tree is edited for it, nor built again.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from torch_infini._library import PATH

ROOT = Path(__file__).resolve().parent.parent
VENDOR = ROOT / "tests" / "vendor_device"
VARIABLES = (("CXX", "g++"), ("CXXFLAGS", ""), ("LDFLAGS", ""))


def test_a_vendors_library_brings_a_device_and_two_ops(tmp_path: Path) -> None:
    library = tmp_path / "libinfini_qy.so"
    cxx, cxxflags, ldflags = (os.environ.get(name, default) for name, default in VARIABLES)
    command = [
        *shlex.split(f"{cxx} {cxxflags} -std=c++17 -O1 -Wall -Wextra -Werror -fPIC -shared"),
        *(f"-I{ROOT / 'csrc' / folder}" for folder in ("include", "common", "infiniop", "infinirt")),
        *(str(VENDOR / name) for name in ("backend.cpp", "rms_norm.cpp", "add.cpp")),
        *("-o", str(library), "-Wl,-z,defs", f"-L{PATH.parent}", "-linfiniop", "-linfinirt"),
        *shlex.split(ldflags),
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    used = subprocess.run(
        [sys.executable, str(VENDOR / "use.py"), str(library)], capture_output=True, text=True, cwd=ROOT
    )
    assert (used.returncode, used.stdout.strip()) == (0, "fine"), used.stdout + used.stderr
