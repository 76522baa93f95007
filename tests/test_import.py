"""Importing the package: again after an import that failed, and its demo model from any working directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
AGAIN = """
import os, sys
for turn in range(2):
    try:
        import torch_infini
    except Exception as error:
        print(type(error).__name__ + ": " + str(error))
os.environ.pop(sys.argv[1])
import torch, torch_infini
print(torch_infini.ops.add(torch.ones(2), torch.ones(2)).tolist())
print(torch.ops.infini.swiglu(torch.zeros(1, 2), torch.ones(1, 2)).tolist())
"""


def python(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=cwd)


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("variable", ["INFINI_LIBRARIES", "INFINI_CPU_CAPABILITY"])
def test_import_again_after_a_failure(variable: str, tmp_path: Path) -> None:
    """A second import in a process raises the same error; it works once the cause is removed."""
    done = python("-c", AGAIN, variable, **{variable: str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, *results = done.stdout.splitlines()
    assert first.startswith("ImportError: ")
    assert variable in first
    assert second == first
    assert results == ["[2.0, 2.0]", "[[0.0, 0.0]]"]


def test_import_loads_no_test_material() -> None:
    """What proves the ops is loaded by doctor, tests and benchmarks on demand."""
    done = python(
        "-c", "import sys, torch_infini; print([m for m in sys.modules if m.startswith('torch_infini.testing')])"
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.full
def test_readme_serves_the_demo_model_from_another_folder(tmp_path: Path) -> None:
    """The README's block about LLM runs as it stands where there is no clone; transformers takes the same path."""
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    (serve,) = (block.split("```")[0] for block in blocks if "LLM(" in block.split("```")[0])
    script = tmp_path / "serve.py"
    script.write_text(
        serve
        + "\nfrom transformers import AutoModelForCausalLM\n"
        + "import torch_infini\n"
        + "assert AutoModelForCausalLM.from_pretrained(torch_infini.demo.MODEL).config.num_hidden_layers == 4\n"
    )
    done = python(str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 100
    assert not [entry for entry in tmp_path.iterdir() if entry != script]
