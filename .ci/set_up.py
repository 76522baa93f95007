"""Sets up .venv for make: torch and the packages, while what needs no torch is already compiled.

    python3 .ci/set_up.py VENV TORCH      TORCH: the release to install where this interpreter has none

Each step prints a line with its time. What is there already is enough (then no registry is asked); what is missing is
installed as pinned in constraints.txt. pip's warnings are hidden, its errors are not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = "numpy, pytest, xdist, expecttest, transformers, safetensors"  # by the tests, under the names they import
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check", "--root-user-action", "ignore")
PINNED = ("-c", ".ci/constraints.txt")


def say(text: str) -> None:
    # \r and erase: the compilation's progress may stand on this line.
    print(f"\r\x1b[K{text}" if sys.stdout.isatty() else text, flush=True)


@contextmanager
def step(name: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    say(f"set-up: {name}: {time.monotonic() - start:.0f} s")


class SetUp:
    """The environment `venv`, and the compilation that runs meanwhile."""

    def __init__(self, venv: Path) -> None:
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.compilation: subprocess.Popen[bytes] | None = None

    def run(self, *arguments: str, quiet: bool = False, **environment: str) -> bool:
        """Whether .venv's python ends well with these arguments; exits as soon as the compilation has failed."""
        output = subprocess.DEVNULL if quiet else None
        env = {**os.environ, **environment}
        command = [str(self.python), *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output)
        while process.poll() is None:
            if self.compilation and self.compilation.poll():
                process.terminate()
                process.wait()
                sys.exit(1)
            time.sleep(0.05)
        return process.returncode == 0

    def has(self, modules: str) -> bool:
        return self.run("-c", f"import {modules}", quiet=True)

    def pip(self, *arguments: str, quiet: bool = False, **environment: str) -> bool:
        return self.run(*PIP, *arguments, quiet=quiet, **environment)

    def make_environment(self) -> None:
        """An environment with the packages of this interpreter, if it has torch, and with what the build needs."""
        subprocess.run([sys.executable, "-m", "venv", str(self.venv)], check=True)
        if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0:
            # A path file lends them, be this interpreter a virtual environment itself or not.
            code = "import sysconfig; print(sysconfig.get_path('purelib'))"
            packages = subprocess.run([str(self.python), "-c", code], capture_output=True, text=True, check=True)
            lent = "\n".join(path for path in sys.path if path.endswith("-packages"))
            Path(packages.stdout.strip(), "base-interpreter.pth").write_text(lent + "\n")
        # Before 70.1 setuptools made wheels with the help of another package.
        makes_wheels = self.has("setuptools.command.bdist_wheel") or self.has("setuptools, wheel")
        if not makes_wheels and not self.pip(*PINNED, "setuptools", "wheel"):
            sys.exit("set-up: setuptools and wheel could not be installed")
        on_path = any(os.access(Path(folder, "ninja"), os.X_OK) for folder in os.get_exec_path())
        if not on_path and not self.has("ninja") and not self.pip(*PINNED, "ninja"):
            sys.exit("set-up: ninja could not be installed")
        if not self.has("pybind11"):
            self.pip(*PINNED, "pybind11", quiet=True)  # setup.py says what it leaves out without it

    def install_torch(self, release: str) -> None:
        """The CPU build: uv knows where PyTorch keeps it; pip finds one only where a configured index has it."""
        found = self.pip(f"torch=={release}+cpu", quiet=True) or (
            self.pip("uv")
            and self.run(
                *f"-m uv pip install -q --python {self.python}".split(),
                *f"--torch-backend cpu torch=={release}".split(),
            )
        )
        if not found:
            sys.exit(
                f"set-up: no CPU build of torch {release} could be installed: install any torch >= 2.11 for "
                f"{sys.executable} (see pytorch.org) and call make again"
            )

    def install_packages(self) -> None:
        """The package itself, editable, and what it and its tests import."""
        package = ("--no-build-isolation", "-e")
        later = {"INFINI_BUILD": "0"}  # the libraries are built outside pip, where it can be seen
        command = [str(self.python), *PIP, "--no-index", *package, ".[test]"]
        offline = subprocess.run(command, cwd=ROOT, env={**os.environ, **later}, capture_output=True, text=True)
        if offline.returncode == 0 or self.pip(*PINNED, *package, ".[test]", **later):
            return
        if self.has(NEEDED) and self.pip("--no-index", "--no-deps", *package, ".", **later):
            say("set-up: no registry, and no peft or accelerate: their tests will be skipped")
            return
        sys.exit(f"set-up: without a registry pip said: {offline.stdout}{offline.stderr}")

    def start_compilation(self) -> None:
        command = [str(self.python), "-W", "ignore", "setup.py", "-q", "build_kernels"]
        self.compilation = subprocess.Popen(command, cwd=ROOT)

    def finish_compilation(self) -> None:
        if self.compilation and self.compilation.wait():
            sys.exit(1)  # it has said why


def main() -> None:
    set_up = SetUp(Path(os.path.abspath(sys.argv[1])))
    release = sys.argv[2]
    with step(f"environment {sys.argv[1]}"):
        set_up.make_environment()
    set_up.start_compilation()
    try:
        if set_up.has("torch"):
            say(f"set-up: using the torch of {sys.executable}")
        else:
            say(f"set-up: installing torch {release}, the CPU build; the kernels are compiled meanwhile")
            with step(f"torch {release} downloaded and installed"):
                set_up.install_torch(release)
        with step("packages installed"):
            set_up.install_packages()
        set_up.finish_compilation()
    finally:
        if set_up.compilation and set_up.compilation.poll() is None:
            set_up.compilation.terminate()
            set_up.compilation.wait()


if __name__ == "__main__":
    main()
