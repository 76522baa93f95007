"""A build without torch_infini.compat (INFINI_COMPAT=0): the rest stands without it, and a sentence says how to get it.

In a copy of the package from which the folder is gone, in processes of their own.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SENTENCE = (
    "torch_infini.compat, which scripts for infinicore and infinilm need, is not in this build, made with "
    "INFINI_COMPAT=0: `pip install --force-reinstall --no-deps .` in a checkout, without that variable, has it"
)
SERVES = """
import sys
import httpx2 as httpx
import torch
from support.serving import MODEL, service_of, serving
from transformers import LlamaConfig, LlamaForCausalLM
import torch_infini
from torch_infini import *

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128, max_position_embeddings=64)).eval()
ids = torch.randint(0, 128, (2, 16))
with torch.no_grad():
    before = model(ids).logits
    patch_model(model)
    assert torch.allclose(model(ids).logits, before, atol=1e-4)
recorded = torch_infini.runtime.record(lambda: torch.ops.infini.add(ids, ids))
assert torch.equal(recorded.run(), 2 * ids)
params = SamplingParams(temperature=0, max_tokens=8)
(output,) = LLM(torch_infini.demo.MODEL).generate(["The for statement"], params)
with serving(service_of(AsyncLLM(torch_infini.demo.MODEL))) as url:
    body = {"model": MODEL, "prompt": "The for statement", "temperature": 0, "max_tokens": 8}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
assert answer["choices"][0]["text"] == output.text, answer
for part in torch_infini.__all__:
    getattr(torch_infini, part)
assert "compat" not in dir(torch_infini)
assert not [name for name in sys.modules if "compat" in name.split(".") and name.startswith("torch_infini.")]
"""
IMPORTS = """
import importlib
import torch_infini
for name in ("torch_infini.compat", "torch_infini.compat.infinicore", "torch_infini.compat.infinilm.cache"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error)
try:
    torch_infini.compat
except ModuleNotFoundError as error:
    print(error)
try:
    import torch_infini.compatible
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, without compat."""
    folder = tmp_path_factory.mktemp("without")
    leave = shutil.ignore_patterns("compat", "__pycache__", "lib")
    shutil.copytree(ROOT / "torch_infini", folder / "torch_infini", ignore=leave)
    (folder / "torch_infini" / "lib").symlink_to(ROOT / "torch_infini" / "lib")
    return folder


def python(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), str(ROOT / "tests")))}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=tree)


@pytest.mark.full
def test_the_product_stands_alone(tree: Path) -> None:
    """It imports, patches, records and serves, and every name of it is there."""
    for package in ("transformers", "httpx2", "fastapi"):
        pytest.importorskip(package)
    done = python(tree, "-W", "error::ImportWarning", "-c", SERVES)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_what_asks_for_it(tree: Path) -> None:
    done = python(tree, "-c", IMPORTS)
    assert done.stdout.splitlines() == [*[SENTENCE] * 4, "No module named 'torch_infini.compatible'"], done.stderr
    (tree / "script.py").write_text("import infinicore\n")
    for arguments in (("script.py",), ("-m", "infinilm.server")):
        done = python(tree, "-m", "torch_infini", "run", *arguments)
        assert (done.returncode, done.stderr) == (2, f"torch_infini run: {SENTENCE}\n")


@pytest.mark.full
def test_env_and_doctor_list_it(tree: Path) -> None:
    build = "without compat, for scripts of infinicore and infinilm (INFINI_COMPAT=0)"
    assert json.loads(python(tree, "-m", "torch_infini", "env", "--json").stdout)["build"] == build
    done = python(tree, "-m", "torch_infini", "doctor", "--ops", "silu")
    assert done.returncode == 0 and f"build: {build}\n" in done.stdout, done.stdout + done.stderr


def test_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies neither compat nor its module, also where an earlier build has left them, and compiles no module."""
    folder = tmp_path / "torch_infini"
    for variable in ("1", "0"):
        command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
        env = {**os.environ, "INFINI_COMPAT": variable}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        has = variable == "1"
        assert (folder / "compat").exists() is has
        assert bool(list((folder / "lib").glob("_infinicore.*"))) is has
        assert (folder / "engine" / "llm.py").is_file() and (folder / "lib" / "libinfiniop.so").is_file()
    monkeypatch.setenv("INFINI_COMPAT", "0")
    rules = runpy.run_path(str(ROOT / "build_rules.py"), run_name="test_without_compat")
    assert rules["module_flags"]() == (None, "INFINI_COMPAT=0")
    written = rules["ninja_file"](None, None)
    assert "infinicore.python" not in written and "infinicore.graph" in written


def test_a_value_that_is_no_switch() -> None:
    done = subprocess.run(
        [sys.executable, "build_rules.py"],
        cwd=ROOT,
        env={**os.environ, "INFINI_COMPAT": "off"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "torch_infini: INFINI_COMPAT must be 0 or 1, got 'off'\n")
