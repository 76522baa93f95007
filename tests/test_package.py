"""The root of the package: what `import torch_infini` loads, and that every part is an attribute of it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

import torch_infini

# Needs the packages of an extra, so that `from torch_infini import *` leaves it out.
EXTRA = ("serve",)


def loaded_by(code: str) -> set[str]:
    """The rooms of torch_infini that a new process has after this code."""
    listing = "import json, sys; print(json.dumps([name for name in sys.modules if name.startswith('torch_infini.')]))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{listing}"], capture_output=True, text=True, check=True)
    return {name.split(".")[1] for name in json.loads(done.stdout.splitlines()[-1])}


def test_import_loads_the_ops_and_the_backend_alone() -> None:
    assert loaded_by("import torch_infini") == {"_core", "distributed", "ops"}


def test_the_ops_and_the_backend_are_there_after_the_import() -> None:
    code = "import torch, torch_infini; print(torch.ops.infini.rms_norm, torch.distributed.is_backend_available"
    assert loaded_by(f"{code}('infiniccl'))") == {"_core", "distributed", "ops"}


@pytest.mark.full
def test_every_name_is_an_attribute() -> None:
    """Each in a process that has loaded nothing else: forked, as a new one takes seconds to import torch."""
    names = [*torch_infini.__all__, *(EXTRA if find_spec("fastapi") else ())]
    code = f"""
import os, torch_infini
for name in {names}:
    if not os.fork():
        part = getattr(torch_infini, name)
        os._exit(getattr(torch_infini, name) is not part)
    assert os.wait()[1] == 0, name
"""
    assert loaded_by(code) == {"_core", "distributed", "ops"}


def test_dir_and_all_agree() -> None:
    assert [name for name in dir(torch_infini) if not name.startswith("__")] == sorted(torch_infini.__all__)
    names: dict[str, object] = {}
    exec("from torch_infini import *", names)
    assert names.keys() - {"__builtins__"} == set(torch_infini.__all__)


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(AttributeError, match="^module 'torch_infini' has no attribute 'patch_modle'$"):
        torch_infini.patch_modle  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'patch_modle' from 'torch_infini'"):
        exec("from torch_infini import patch_modle")
