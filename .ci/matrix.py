"""Tries the wheel of dist/ in empty environments, and keeps what came of it in docs/matrix.csv.

    python .ci/matrix.py [--only TEXT] [--large] [--plan]

PLAN has the environments: a Python, a release of torch and one of transformers each. Each is made under build/matrix,
and removed after its checks: `doctor` for the ops of OPS, the Python blocks of README.md, and a script of InfiniLM.
With transformers 4, which only scripts of InfiniLM are promised, patch_model is not tried.

torch is the CPU build as .ci/set_up.py finds it; with --large otherwise the build that the index has, with CUDA (5 GB,
also removed). A Python or a release that cannot be had is a row that says so. --only TEXT tries the rows that contain
it, as --plan prints them; the others stay as they are.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "matrix"
RESULTS = ROOT / "docs" / "matrix.csv"
OPS = "rms_norm,add_rms_norm,rope,swiglu,linear,linear_int4,attention,paged_attention,random_sample"
COLUMNS = ("python", "torch", "transformers", "found", "ops", "readme", "infinilm", "why", "date")
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "--root-user-action", "ignore")
SECONDS = 900  # that a check may take


class Environment(NamedTuple):
    """What is asked for.

    A transformers of "pinned" is that of .ci/constraints.txt, "newest" what pip finds for the extra [hf].
    """

    python: str
    torch: str
    transformers: str = "pinned"

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}, transformers {self.transformers}"


# Each release of torch, each Python, and each end of transformers once.
PLAN = (
    Environment("3.11", "2.13.0"),
    Environment("3.11", "2.13.0", "newest"),
    Environment("3.11", "2.13.0", "5.0.0"),
    Environment("3.11", "2.13.0", "4.57.1"),
    Environment("3.10", "2.11.0", "newest"),  # 5.20.2: later releases need Python 3.11
    Environment("3.12", "2.12.1"),
    Environment("3.13", "2.14.1"),
    Environment("3.14", "2.14.1"),
    Environment("3.12", "2.15.0"),
)

FOUND = """
from importlib.metadata import version
import platform
print(platform.python_version(), version("torch"), version("transformers"))
"""


class Unavailable(Exception):
    """An interpreter or a release that cannot be had here."""


def interpreter(release: str) -> str:
    """A command for this Python: this one, one on PATH, or pyenv's newest."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    is_ours = os.access(pyenv, os.R_OK | os.X_OK)  # PYENV_ROOT may be another user's
    found = pyenv.glob(f"{release}.*/bin/python") if is_ours else ()
    theirs = sorted(found, key=lambda path: int(path.parts[-3].split(".")[2]))
    for python in (sys.executable, shutil.which(f"python{release}"), *map(str, reversed(theirs))):
        asked = (python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        if python and subprocess.run(asked, capture_output=True, text=True).stdout.strip() == release:  # type: ignore[arg-type]
            return python
    raise Unavailable(f"there is no Python {release} on this machine")


def sentence(text: str) -> str:
    """The line in which a program says why it failed: doctor's, or the last one; at most 200 characters."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    found = next((line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")), "")
    return (found or (lines[-1] if lines else "it said nothing"))[:200]


class Trial:
    """An environment under build/matrix, and the checks in it."""

    def __init__(self, wanted: Environment, wheel: Path, large: bool) -> None:
        self.wanted, self.wheel, self.large = wanted, wheel, large
        self.folder = WORK / f"{wanted.python}-{wanted.torch}-{wanted.transformers}"
        self.python = self.folder / "env" / "bin" / "python"
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("INFINI_", "PYTHON", "VIRTUAL_ENV"))}
        self.variables = {**variables, "OMP_NUM_THREADS": "1", "UV_CACHE_DIR": str(self.folder / "uv")}

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a program in the environment's folder, where no checkout is."""
        try:
            return subprocess.run(
                command, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 1, "", f"it took more than {SECONDS} s")

    def install_torch(self) -> None:
        """The CPU build as .ci/set_up.py finds it; otherwise, with --large, what the index has."""
        release = f"torch=={self.wanted.torch}"
        uv = (self.python, "-m", "uv", "pip", "install", "-q", "--python", self.python)
        self.run(self.python, *PIP, "uv")
        ways = [(self.python, *PIP, f"{release}+cpu"), (*uv, "--torch-backend", "cpu", release)]
        if self.large:
            ways.append((*uv, release))
        if not any(self.run(*way).returncode == 0 for way in ways):
            raise Unavailable(f"no CPU build of torch {self.wanted.torch} could be installed here")

    def install_wheel(self) -> None:
        """The wheel with what its users install beside it."""
        asked = pinned("transformers") if self.wanted.transformers == "pinned" else self.wanted.transformers
        packages = [f"{self.wheel}[hf]", "numpy", f"transformers=={asked}"]
        if asked == "newest":
            packages.pop()
        elif asked.startswith("4."):  # the extra takes 5 alone
            packages[0] = str(self.wheel)
            packages.append("safetensors")
        done = self.run(self.python, *PIP, *packages)
        if done.returncode:
            raise Unavailable(f"the wheel could not be installed: {sentence(done.stderr)}")

    def check(self, name: str, *command: str | Path) -> tuple[str, str]:
        """("ok", "") or ("failed", why)."""
        done = self.run(self.python, *command)
        if done.returncode == 0:
            return "ok", ""
        print(done.stdout + done.stderr, file=sys.stderr)
        return "failed", f"{name}: {sentence(done.stdout + done.stderr)}"

    def checks(self) -> dict[str, str]:
        """What the columns of the table say."""
        found = self.run(self.python, "-c", FOUND).stdout.strip()
        if not found.split()[1:2] or found.split()[1].partition("+")[0] != self.wanted.torch:
            raise Unavailable(f"pip's settings here allow no torch {self.wanted.torch}, got {found or 'none'}")
        readme, numbers = self.folder / "readme.py", "1,5,9,12"
        readme.write_text("\n".join(python_blocks(ROOT / "README.md")))
        script = ROOT / "tests" / "infinilm_scripts" / "static_newer.py"
        model = self.run(self.python, "-c", "from torch_infini.demo import MODEL; print(MODEL)").stdout.strip()
        results = {
            "ops": self.check("doctor", "-m", "torch_infini", "doctor", "--ops", OPS),
            "readme": ("-", "") if self.wanted.transformers.startswith("4.") else self.check("README", readme),
            "infinilm": self.check("infinilm", "-m", "torch_infini", "run", script, model, numbers, "8"),
        }
        why = "; ".join(reason for _, reason in results.values() if reason)
        return {"found": found, **{name: result for name, (result, _) in results.items()}, "why": why}

    def make(self) -> dict[str, str]:
        """Make the environment, check it, and remove it: its row of the table."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        try:
            made = self.run(interpreter(self.wanted.python), "-m", "venv", "env")
            if made.returncode:
                raise Unavailable(f"no environment could be made: {sentence(made.stdout + made.stderr)}")
            self.install_torch()
            shutil.rmtree(self.folder / "uv", ignore_errors=True)  # its cache is as large as the torch with CUDA
            self.install_wheel()
            return self.checks()
        except Unavailable as error:
            return {"found": "", "ops": "-", "readme": "-", "infinilm": "-", "why": str(error)}
        finally:
            shutil.rmtree(self.folder)


def pinned(package: str) -> str:
    """The release of a package in .ci/constraints.txt."""
    lines = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pin = next(line for line in lines if line.startswith(f"{package}=="))
    return pin.partition("==")[2].partition(";")[0].strip()


def python_blocks(page: Path) -> list[str]:
    """The Python of a page, as tests/test_docs.py runs it."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def read_results(path: Path) -> dict[Environment, dict[str, str]]:
    """The rows of the table that was written before, by environment."""
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {Environment(row["python"], row["torch"], row["transformers"]): row for row in csv.DictReader(file)}


def write_results(path: Path, rows: dict[Environment, dict[str, str]]) -> None:
    """Write the table: the environments of PLAN, in its order."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[wanted] for wanted in PLAN if wanted in rows)


def chosen(only: str) -> list[Environment]:
    """The environments whose line of --plan contains a text."""
    found = [wanted for wanted in PLAN if only in str(wanted)]
    if not found:
        sys.exit(f"matrix: --only must be a part of a line that --plan prints, got {only!r}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="try the environments whose line of --plan contains this")
    parser.add_argument("--large", action="store_true", help="take builds with CUDA where there is no CPU build (5 GB)")
    parser.add_argument("--plan", action="store_true", help="print the environments, and make none")
    options = parser.parse_args(arguments)
    wanted = chosen(options.only)
    if options.plan:
        print("\n".join(map(str, wanted)))
        return 0
    wheels = sorted((ROOT / "dist").glob(f"*{platform.machine()}.whl"))
    if len(wheels) != 1:
        names = ", ".join(wheel.name for wheel in wheels) or "none"
        sys.exit(f"matrix: dist/ must have one wheel, got {names}: `make wheel` makes it")
    failed = False
    for one in wanted:
        print(f"matrix: {one}", flush=True)
        result = Trial(one, wheels[0], options.large).make()
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        rows = read_results(RESULTS)  # here: another run may have added to it
        rows[one] = {**one._asdict(), **result, "date": today}
        write_results(RESULTS, rows)
        failed |= "failed" in result.values()
        said = ", ".join(f"{name} {result[name]}" for name in ("ops", "readme", "infinilm"))
        print(
            f"matrix:   {result['found'] or 'nothing'}: {said}{'; ' if result['why'] else ''}{result['why']}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
