"""The wheel and the source archive that .ci/wheel.py makes: their tags, what is in them, the same bytes twice; use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = "1800000000"
pytestmark = pytest.mark.full  # two wheels: 20 s each
USE = """
import torch, torch_infini
x = torch.randn(3, 8)
w = torch.ones(8)
assert torch.allclose(torch.ops.infini.rms_norm(x, w, 1e-6), torch.nn.functional.rms_norm(x, (8,), w, 1e-6))
import torch_infini.compat.infinicore
print(torch_infini.__file__)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("auditwheel")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, str(ROOT / ".ci" / "wheel.py"), "--pythons", sys.executable, "--out"]
    for name in ("first", "second"):
        done = subprocess.run(
            [*command, str(out / name)],
            env={**os.environ, "SOURCE_DATE_EPOCH": SECONDS},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    yield out


def test_the_same_source_gives_the_same_bytes(made: Path) -> None:
    first, second = ({file.name: file.read_bytes() for file in (made / name).iterdir()} for name in ("first", "second"))
    assert first == second and len(first) == 2


def test_what_is_in_the_wheel(made: Path) -> None:
    """One wheel for all Pythons, for Linux with glibc 2.34; libraries without symbols of debuggers; an SBOM."""
    (wheel,) = (made / "first").glob("*.whl")
    _, version, *tags = wheel.stem.split("-")
    assert tags[:2] == ["py3", "none"] and tags[2].startswith("manylinux_2_3")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        libraries = [name for name in names if name.endswith(".so")]
        assert {Path(name).parent.as_posix() for name in libraries} == {"torch_infini/lib"} and len(libraries) >= 7
        assert not any(b".debug_info" in archive.read(name) for name in libraries)
        sbom = json.loads(archive.read(f"torch_infini-{version}.dist-info/sboms/torch_infini.cdx.json"))
    assert {one["name"] for one in sbom["components"] if one["type"] == "file"} == {
        Path(name).name for name in libraries
    }
    assert "torch_infini_autoload.py" in names and not [name for name in names if name.startswith(("tests", "csrc"))]


def test_what_is_in_the_source_archive(made: Path) -> None:
    (source,) = (made / "first").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "build_rules.py", "csrc/infiniop/rms_norm/rms_norm_cpu.cpp", "LICENSE", "PKG-INFO"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith("torch_infini/include/")]


def test_it_runs_without_a_compiler(made: Path, tmp_path: Path) -> None:
    """In an environment of its own, which is lent the torch of this one."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env" / "lib").glob("*/site-packages")
    (wheel,) = (made / "first").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    import torch

    (packages / "lent.pth").write_text(str(Path(torch.__file__).parent.parent))
    environment = {"PATH": str(python.parent), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(packages / "torch_infini" / "__init__.py")
