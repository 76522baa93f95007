"""Sets up .venv for make: torch and the packages, while what needs no torch is already compiled.

    python3 .ci/set_up.py VENV TORCH LAYER

TORCH is the release to install where this interpreter has none. LAYER is demo (what `make demo` imports and runs) or
test (what the tests import; everything is compiled). Each step prints a line with its time. What is there already is
enough (then no registry is asked); what is missing is installed as pinned in constraints.txt. pip's warnings are
hidden, its errors are not. VENV/.demo and VENV/.test say that a layer is complete.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# By layer: the extra of pyproject.toml, and what it cannot do without, under the names that are imported.
EXTRAS = {"demo": "hf", "test": "test"}
NEEDED = {"demo": "transformers, safetensors", "test": "numpy, pytest, xdist, expecttest, transformers, safetensors"}
MADE_FROM = ("pyproject.toml", ".ci/constraints.txt")  # a change of these sets up anew
# --no-compile: torch and transformers have 5,000 files, of which a process imports some; Python compiles those itself.
PIP = ("-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check", "--root-user-action", "ignore")
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

    def __init__(self, venv: Path, layer: str = "test") -> None:
        self.venv, self.layer = venv, layer
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
        made = subprocess.run([sys.executable, "-m", "venv", str(self.venv)], capture_output=True, text=True)
        if made.returncode:
            said = " ".join((made.stdout + made.stderr).split())
            sys.exit(f"set-up: {sys.executable} could make no environment {self.venv}: {said}")
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
        if not self.has("ninja") and not self.pip(*PINNED, "ninja"):
            sys.exit(
                "set-up: ninja could not be installed: pip's message is above; make goes on here when called again"
            )
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
        wanted = f".[{EXTRAS[self.layer]}]"
        later = {"INFINI_BUILD": "0"}  # the libraries are built outside pip, where it can be seen
        command = [str(self.python), *PIP, "--no-index", *package, wanted]
        offline = subprocess.run(command, cwd=ROOT, env={**os.environ, **later}, capture_output=True, text=True)
        if offline.returncode == 0 or self.pip(*PINNED, *package, wanted, **later):
            return
        if self.has(NEEDED[self.layer]) and self.pip("--no-index", "--no-deps", *package, ".", **later):
            say("set-up: no registry, and not all packages: tests of those that are missing will be skipped")
            return
        sys.exit(
            f"set-up: the packages of {wanted} could not be installed: pip's message is above; "
            "make goes on here when called again"
        )

    def start_compilation(self) -> None:
        command = [str(self.python), "-W", "ignore", "setup.py", "-q", "build_kernels"]
        command += ["--demo"] if self.layer == "demo" else []
        self.compilation = subprocess.Popen(command, cwd=ROOT)

    def finish_compilation(self) -> None:
        if self.compilation and self.compilation.wait():
            sys.exit(1)  # it has said why

    def stamps(self) -> list[Path]:
        """The files that say which layers are complete once this one is."""
        return [self.venv / f".{layer}" for layer in (("demo",) if self.layer == "demo" else ("demo", "test"))]

    def is_complete(self) -> bool:
        newest = max((ROOT / file).stat().st_mtime for file in MADE_FROM)
        return all(stamp.is_file() and stamp.stat().st_mtime >= newest for stamp in self.stamps())

    def make(self, release: str) -> None:
        with step(f"environment {self.venv.name}"):
            self.make_environment()
        self.start_compilation()
        try:
            if self.has("torch"):
                say(f"set-up: using the torch of {self.python if self.is_own('torch') else sys.executable}")
            else:
                say(f"set-up: installing torch {release}, the CPU build; the kernels are compiled meanwhile")
                with step(f"torch {release} downloaded and installed"):
                    self.install_torch(release)
            with step("packages installed"):
                self.install_packages()
            self.finish_compilation()
        finally:
            if self.compilation and self.compilation.poll() is None:
                self.compilation.terminate()
                self.compilation.wait()
        for stamp in self.stamps():
            stamp.touch()

    def is_own(self, package: str) -> bool:
        """Whether the environment has a package itself, and is not lent it by the interpreter that made it."""
        return any(self.venv.glob(f"lib/*/site-packages/{package}"))


def main() -> None:
    set_up = SetUp(Path(os.path.abspath(sys.argv[1])), sys.argv[3])
    (ROOT / "build").mkdir(exist_ok=True)
    lock = ROOT / "build" / "set_up.lock"
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"set-up: another make is setting up {set_up.venv.name}: waiting for its end")
            fcntl.flock(held, fcntl.LOCK_EX)
        if not set_up.is_complete():
            set_up.make(sys.argv[2])


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("set-up: interrupted; make goes on here when called again")
