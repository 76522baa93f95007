"""compat: infinicore and infinilm under their own names, the same module objects; and scripts that run with them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_infini import compat

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = set(sys.modules)
    yield
    compat.uninstall()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("madeup", "madeup_real", "_madeup", "infinicore", "infinilm", "_infinilm"):
            del sys.modules[name]


@pytest.fixture
def madeup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package madeup_real that serves as madeup."""
    files = {
        "__init__": "from .early import early\nfrom .nn import functional\n",
        "early": "class Early: pass\ndef early(): return Early\n",  # the function takes the place of its module
        "nn/__init__": "class Module: pass\n",
        "nn/functional": "from . import Module\n",
        "lib/__init__": "",
        "lib/_low": "from ..nn import Module\nclass Low(Module): pass\n",
        "broken": "raise ValueError('broken')\n",
    }
    for name, text in files.items():
        path = tmp_path / "madeup_real" / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compat, "ALIASES", {"madeup": "madeup_real", "_madeup": "madeup.lib._low"})
    monkeypatch.setattr(compat, "OVERRIDES", {})
    return tmp_path


def test_the_same_modules(madeup: Path) -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("madeup")
    compat.install()
    compat.install()  # twice is once
    low = importlib.import_module("madeup.lib._low")
    real = importlib.import_module("madeup_real")
    for name in ("", ".nn", ".nn.functional", ".lib", ".lib._low", ".early"):
        importlib.import_module(f"madeup{name}")
        assert sys.modules[f"madeup{name}"] is sys.modules[f"madeup_real{name}"], name
    assert low.Low.__mro__[1] is real.nn.Module and real.nn.Module.__module__ == "madeup_real.nn"
    assert real.early() is sys.modules["madeup_real.early"].Early, "the import of an alias wrote over the function"
    assert (real.__spec__.name, real.__name__, real.__package__) == ("madeup_real",) * 3
    assert real.nn.__spec__.name == "madeup_real.nn" and real.nn.__package__ == "madeup_real.nn"
    scope: dict[str, object] = {}
    exec("from madeup.nn import functional as F, Module\nfrom madeup import *", scope)
    assert scope["F"] is real.nn.functional and scope["Module"] is real.nn.Module
    assert sum(isinstance(finder, compat.AliasFinder) for finder in sys.meta_path) == 1


def test_an_alias_of_an_alias(madeup: Path) -> None:
    compat.install()
    low = importlib.import_module("_madeup")
    assert low is sys.modules["madeup.lib._low"] is sys.modules["madeup_real.lib._low"]
    compat.uninstall()
    assert not {"_madeup", "madeup", "madeup.lib._low"} & sys.modules.keys()


def test_overrides(madeup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that leads elsewhere in one module, whichever way a script comes to it, and nowhere else."""
    (madeup / "madeup_real" / "other.py").write_text("from .nn import Module\nclass Module(Module): pass\n")
    overrides = {"Module": ("madeup_real.other", "Module")}
    monkeypatch.setattr(compat, "OVERRIDES", {"madeup": {}, "madeup.lib": {}, "madeup.lib._low": overrides})
    compat.install()
    scope: dict[str, object] = {}
    exec(
        "import madeup, _madeup, madeup.lib._low as low\n"
        "from madeup.lib import _low\nfrom madeup.lib._low import *\nfrom madeup import nn",
        scope,
    )
    real = importlib.import_module("madeup_real")
    other = importlib.import_module("madeup_real.other").Module
    low = scope["low"]
    assert low is scope["_low"] is scope["_madeup"] is scope["madeup"].lib._low is sys.modules["madeup.lib._low"]
    assert low.Module is scope["Module"] is other and issubclass(other, real.nn.Module)
    assert low.Low is scope["Low"] is real.lib._low.Low
    assert real.lib._low.Module is real.nn.Module is scope["nn"].Module
    assert scope["nn"] is real.nn is scope["madeup"].nn
    assert low.__package__ == "madeup.lib" and low.__file__ == real.lib._low.__file__ and "Low" in dir(low)
    with pytest.raises(AttributeError, match="madeup_real.lib._low' has no attribute 'nothing'"):
        getattr(low, "nothing")  # noqa: B009
    with pytest.raises(ModuleNotFoundError, match="No module named 'madeup.nothing'"):
        importlib.import_module("madeup.nothing")
    compat.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] in ("madeup", "_madeup")]


def test_what_is_not_there(madeup: Path) -> None:
    compat.install()
    with pytest.raises(ModuleNotFoundError, match="No module named 'madeup.nothing'"):
        importlib.import_module("madeup.nothing")
    assert importlib.util.find_spec("madeup.nothing") is None
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("madeup.broken")
    assert "madeup.broken" not in sys.modules


def test_no_module_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "ALIASES", {"madeup": "torch_infini.nothing"})
    compat.install()
    with pytest.raises(ModuleNotFoundError, match="No module named 'torch_infini.nothing', .* serve as 'madeup'"):
        importlib.import_module("madeup")


def test_uninstall(madeup: Path) -> None:
    compat.install()
    importlib.import_module("madeup.nn")
    compat.uninstall()
    compat.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "madeup"]
    assert "madeup_real.nn" in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("madeup.nn")


class TestAnotherPackage:
    """Of the same name."""

    @pytest.fixture
    def another(self, madeup: Path) -> Path:
        (madeup / "madeup").mkdir()
        (madeup / "madeup" / "__init__.py").write_text("real = True\n")
        importlib.invalidate_caches()
        return madeup / "madeup" / "__init__.py"

    def test_is_not_shadowed(self, another: Path) -> None:
        with pytest.raises(ImportError) as caught:
            compat.install()
        assert str(caught.value) == (
            f"torch_infini.compat.install: madeup is installed, in {another}: remove it from sys.path, or take its "
            "place with replace=True (python -m torch_infini run --replace)"
        )
        assert importlib.import_module("madeup").real

    def test_is_replaced_when_asked(self, another: Path) -> None:
        compat.install(replace=True)
        assert importlib.import_module("madeup") is sys.modules["madeup_real"]
        compat.uninstall()
        assert importlib.import_module("madeup").real

    @pytest.mark.parametrize("replace", [False, True])
    def test_that_is_imported_stays(self, another: Path, replace: bool) -> None:
        importlib.import_module("madeup")
        with pytest.raises(ImportError) as caught:
            compat.install(replace=replace)
        assert str(caught.value) == f"torch_infini.compat.install: madeup must not be imported before, got {another}"

    def test_a_mere_folder_is_none(self, madeup: Path) -> None:
        (madeup / "madeup").mkdir()
        importlib.invalidate_caches()
        compat.install()
        assert importlib.import_module("madeup") is importlib.import_module("madeup_real")


@pytest.mark.parametrize("name", ["infinilm", "infinicore"])
def test_ours(name: str) -> None:
    real = importlib.import_module(f"torch_infini.compat.{name}")
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    compat.install()
    for module in [module for module in sys.modules if f"{module}.".startswith(f"torch_infini.compat.{name}.")]:
        alias = module.removeprefix("torch_infini.compat.")
        imported = importlib.import_module(alias)
        if alias in compat.OVERRIDES:
            assert dir(imported) == dir(sys.modules[module])
        else:
            assert imported is sys.modules[module]
    low = {"infinilm": "lib._infinilm", "infinicore": "lib._infinicore"}[name]
    theirs = importlib.import_module(f"torch_infini.compat.{name}.{low}")
    assert (importlib.import_module(f"{name}.{low}") is theirs) == (name == "infinicore")
    assert importlib.import_module(name).Tensor is real.Tensor if name == "infinicore" else True


# ---- python -m torch_infini run ----

SCRIPT = """\
import sys
import helper
import infinilm
import torch_infini.compat.infinilm
from infinilm.lib import _infinilm
import __main__

same = infinilm.LlamaConfig is torch_infini.compat.infinilm.LlamaConfig
print(sys.argv[1:], __name__, __main__.__dict__ is globals(), same)
print(sys.path[0])
print(__file__)
sys.stdout.flush()
helper.end(sys.argv[1:])
"""
HELPER = """
def end(arguments):
    if "fail" in arguments:
        raise ValueError("failed")
    if "exit" in arguments:
        raise SystemExit(7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch_infini", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)


def test_run_a_script(folder: Path) -> None:
    """As `python SCRIPT`: arguments, __main__, the script's folder first, the exit status."""
    script = str(folder / "script.py")
    done = run(script, "--replace", "-h", "-m", "exit")
    assert done.stdout.splitlines() == [
        "['--replace', '-h', '-m', 'exit'] __main__ True True",
        str(folder),
        script,
    ], done.stderr
    assert (done.returncode, done.stderr) == (7, "")


def test_run_a_module(folder: Path) -> None:
    """As `python -m MODULE`, and a traceback begins in the script."""
    done = run("-m", "script", "--flag", "fail", cwd=folder)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "['--flag', 'fail'] __main__ True True",
        str(folder),
        str(folder / "script.py"),
    ]
    head, first, *_, last = done.stderr.splitlines()
    assert head == "Traceback (most recent call last):" and last == "ValueError: failed"
    assert first.startswith(f'  File "{folder / "script.py"}", line ')


def test_tracebacks_of_a_script(folder: Path) -> None:
    """They are what Python prints without us; a script has none of our own __future__ imports."""
    script = folder / "failing.py"
    script.write_text("import helper\ndef typed(x: missing): ...\n")
    done = run(str(script))
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "name 'missing' is not defined" in plain.stderr
    assert (done.returncode, done.stderr) == (1, plain.stderr)


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "there must be a SCRIPT, or -m MODULE"),
        (("nothing.py",), "SCRIPT must be a Python file, got nothing.py: No such file or directory"),
        (("-m", "nothing"), "No module named nothing"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"torch_infini run: {sentence}\n")


@pytest.mark.full
def test_run_shadows_nothing(folder: Path) -> None:
    """A package of the name beside the script is the script's, unless it is to be replaced."""
    (folder / "infinilm").mkdir()
    (folder / "infinilm" / "__init__.py").write_text("")
    done = run(str(folder / "script.py"))
    place = folder / "infinilm" / "__init__.py"
    assert done.returncode == 2 and f"infinilm is installed, in {place}: remove it" in done.stderr
    done = run("--replace", str(folder / "script.py"))
    assert done.returncode == 0 and "__main__ True True" in done.stdout, done.stderr
