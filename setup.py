"""The package's metadata that pyproject.toml cannot state, and the commands that build its libraries with ninja.

`setup.py build_kernels` compiles what needs no torch: the set-up calls it while torch is downloaded. With --demo, it
and build_ext build the part that `make demo` runs. What is compiled how is in build_rules.py. A cross compiler as CXX
builds in build/MACHINE, and links there against the torch of that machine, INFINI_TARGET_TORCH.
"""

import contextlib
import fcntl
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which pip's builds leave out

from build_rules import (
    BUILD,
    DEMO_LIBRARIES,
    IS_CROSS,
    LIBRARIES,
    MACHINE,
    MODULE,
    OLDEST_TORCH,
    ROOT,
    WITH_COMPAT,
    check_compiler,
    choose_cuda,
    copy_pybind11,
    devices,
    find_torch,
    installed_torch,
    levels_of_this_cpu,
    module_flags,
    modules,
    ninja_file,
)

PINNED_TORCH = "torch==2.13.0"  # installed where there is no torch; docs/install.md
# What tells compilers about the libraries: files of csrc/, and the folders of lib/ where they are looked for.
DESCRIPTIONS = {"infini.pc": "pkgconfig", "infinicore.pc": "pkgconfig", "infini-config.cmake": "cmake/infini"}
WHOLE = BUILD / "whole"  # this file says that once everything was built: from then on no build does less
DEMO_OPTION = ("demo", None, "build what `make demo` runs, unless everything was built before")


def extension(library: str) -> str:
    """The name under which setuptools has a library: a dot of the file's would begin another folder."""
    return f"torch_infini.lib.{library.replace('.', ':')}"


class BuildKernels(Command):
    """Compiles every source that needs no torch; links nothing."""

    user_options = [DEMO_OPTION]
    boolean_options = ["demo"]

    def initialize_options(self) -> None:
        self.demo = False

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        with exclusive():
            run_ninja(ninja_file(None, None, demo_levels(self.demo)), "kernels")


class BuildPython(build_py):
    """Copies the package's files, without compat where INFINI_COMPAT=0 leaves it out."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if not WITH_COMPAT:
            self.packages = [name for name in self.packages if not f"{name}.".startswith("torch_infini.compat.")]

    def find_data_files(self, package: str, folder: str) -> list[str]:
        files = super().find_data_files(package, folder)
        if WITH_COMPAT:
            return files
        # Files of a folder that is no package count as data of the one above; the module may be an earlier build's.
        paths = {file: Path(file).relative_to(folder) for file in files}
        return [file for file, path in paths.items() if path.parts[0] != "compat" and not path.match(f"{MODULE}.*")]

    def run(self) -> None:
        if not WITH_COMPAT and not self.editable_mode:
            package = Path(self.build_lib) / "torch_infini"
            shutil.rmtree(package / "compat", ignore_errors=True)  # of an earlier build
            for module in (package / "lib").glob(f"{MODULE}.*"):
                module.unlink()
        super().run()


class NinjaBuild(build_ext):
    """Writes build/native/build.ninja and runs it; copies the libraries into the package."""

    user_options = [*build_ext.user_options, DEMO_OPTION]
    boolean_options = [*build_ext.boolean_options, "demo"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.demo = False

    def get_ext_filename(self, fullname: str) -> str:
        *folders, name = fullname.split(".")
        return str(Path(*folders, f"{name.replace(':', '.')}.so"))

    def run(self) -> None:
        if os.environ.get("INFINI_BUILD") == "0":
            return
        with exclusive():
            levels = demo_levels(self.demo)
            build(levels)
            if IS_CROSS and self.inplace:  # torch_infini/lib is for this machine; INFINI_LIBRARIES names the other's
                print(f"torch_infini: the libraries for {MACHINE} are in {BUILD.relative_to(ROOT)}", flush=True)
                return
            package = (ROOT if self.inplace else Path(self.build_lib)) / "torch_infini"
            if levels:
                self.extensions = [one for one in self.extensions if one.name in map(extension, DEMO_LIBRARIES)]
                shutil.rmtree(package / "lib", ignore_errors=True)  # of an earlier build, which is gone
            super().run()
            shutil.copytree(ROOT / "csrc" / "include", package / "include", dirs_exist_ok=True)
            if not levels:
                self.describe(package)
                WHOLE.touch()

    def describe(self, package: Path) -> None:
        """Write what tells compilers about the C libraries into the package."""
        for source, folder in DESCRIPTIONS.items():
            described = (ROOT / "csrc" / source).read_text().replace("@VERSION@", self.distribution.get_version())
            (package / "lib" / folder).mkdir(parents=True, exist_ok=True)
            (package / "lib" / folder / source).write_text(described)

    def build_extension(self, ext: Extension) -> None:
        # An editable install copies to the source tree as well, into a folder that has to be there.
        (ROOT / "torch_infini" / "lib").mkdir(exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name))
        library = BUILD / target.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.stat().st_mtime < library.stat().st_mtime:
            # Replaced, not overwritten: a process that has the old library mapped keeps it.
            shutil.copy2(library, f"{target}.new")
            os.replace(f"{target}.new", target)


def demo_levels(demo: bool) -> tuple[str, ...]:
    """The levels of the kernels to build for the demo; (): everything is built."""
    return levels_of_this_cpu() if demo and not WHOLE.exists() else ()


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Keep other builds out of BUILD meanwhile; wait where there is one."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("torch_infini: another build is running here: waiting for its end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), True)  # by ninja, which may outlive this process by an object
        yield


def build(levels: tuple[str, ...]) -> None:
    """Bring the libraries in BUILD up to date: those of the demo with kernels of these levels, or all."""
    torch = find_torch()
    if torch is None:
        sys.exit(f"torch_infini: building needs torch >= {OLDEST_TORCH}: run `pip install {PINNED_TORCH}` first.")
    version = runpy.run_path(str(torch / "version.py"))
    if tuple(int(part) for part in version["__version__"].split(".")[:2]) < tuple(map(int, OLDEST_TORCH.split("."))):
        sys.exit(
            f"torch_infini: building needs torch >= {OLDEST_TORCH}, found {version['__version__']}: "
            f"run `pip install {PINNED_TORCH}`."
        )
    if levels:
        print(f"torch_infini: building what the demo runs on this CPU: {', '.join(levels)}", flush=True)
        run_ninja(ninja_file(torch, None, levels))
        return
    nvcc, reason = (None, f"a cross build for {MACHINE}") if IS_CROSS else choose_cuda(version.get("cuda"))
    print(f"torch_infini: building for CPU{' and CUDA' if nvcc else ' only'} ({reason})", flush=True)
    flags, reason = module_flags()
    if flags is None:
        print(f"torch_infini: building without torch_infini.compat.infinicore ({reason})", flush=True)
    run_ninja(ninja_file(torch, nvcc))
    # Objects of sources that are gone go too: the tests look at all that lie there.
    subprocess.run([*ninja_command(), "-t", "cleandead"], stdout=subprocess.DEVNULL)


def ninja_command() -> list[str]:
    """The environment's own ninja first: another release takes no build for its own, and starts anew."""
    beside = Path(sysconfig.get_path("scripts"), "ninja")
    return [str(beside) if beside.is_file() else shutil.which("ninja") or "ninja", "-C", str(BUILD)]


def run_ninja(text: str, *targets: str) -> None:
    """Build with a build.ninja of this text, and say how far it is; exits if it fails."""
    check_compiler()
    (BUILD / "emulated").mkdir(parents=True, exist_ok=True)
    copy_pybind11()
    (BUILD / "build.ninja").write_text(text)
    jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
    environment = {**os.environ, "NINJA_STATUS": f"{MARK}%f/%t "}
    command = [*ninja_command(), *jobs, *targets]
    ninja = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, errors="replace", close_fds=False
    )
    assert ninja.stdout is not None
    progress, full, interrupted = Progress(), False, False
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for line in ninja.stdout:
            full = full or "No space left on device" in line
            interrupted = interrupted or line.startswith("ninja: build stopped: interrupted")
            if line.startswith(MARK):
                progress.done(*line.removeprefix(MARK).split()[:2])
            elif not line.startswith(("ninja: Entering directory", "ninja: no work to do")):
                progress.clear()
                print(line, end="", flush=True)
    except KeyboardInterrupt:  # ninja has it too, and removes what is half written
        interrupted = True
    finally:
        if sys.exc_info()[0]:
            ninja.terminate()
    if ninja.wait() or interrupted:
        progress.clear()
        if interrupted:
            sys.exit("torch_infini: the build was interrupted; the next one goes on where it ended.")
        if full:
            sys.exit(
                f"torch_infini: the build failed: a disk is full, that of {BUILD} or of the compiler's temporary "
                "files; with room there (300 MB), the next build goes on where this one ended."
            )
        sys.exit("torch_infini: the build failed; the compiler's messages are above.")
    progress.finish()


MARK = "@infini "


class Progress:
    """What ninja has done: on a terminal one line that changes, elsewhere one for each tenth; then each step's time."""

    def __init__(self) -> None:
        self.start = self.last = time.monotonic()
        self.compiled = self.linked = self.link_seconds = 0
        self.shown = ""
        self.tenth = 0

    def done(self, count: str, what: str) -> None:
        finished, total = map(int, count.split("/"))
        now = time.monotonic()
        if what == "LINK":
            self.linked += 1
            self.link_seconds += now - self.last
        else:
            self.compiled += 1
        self.last = now
        text = f"torch_infini: {'linking' if what == 'LINK' else 'compiling'} {finished}/{total}"
        if sys.stdout.isatty():
            print(f"\r{text}", end="", flush=True)
            self.shown = text
        elif 10 * finished // total > self.tenth:
            self.tenth = 10 * finished // total
            print(f"{text}, {now - self.start:.0f} s", flush=True)

    def clear(self) -> None:
        if self.shown:
            print(f"\r{' ' * len(self.shown)}\r", end="", flush=True)
            self.shown = ""

    def finish(self) -> None:
        self.clear()
        if self.compiled:
            seconds = self.last - self.start - self.link_seconds
            print(f"torch_infini: compiled {self.compiled} files: {seconds:.0f} s", flush=True)
        if self.linked:
            print(f"torch_infini: linked {self.linked} libraries: {self.link_seconds:.0f} s", flush=True)


def page_for_an_index() -> str:
    """README.md for a package index, which has no docs/: relative links become their text, pictures go."""
    page = re.sub(r"!\[[^\]]*\]\((?!\w+://)[^)]*\)\n*", "", (ROOT / "README.md").read_text())
    return re.sub(r"\[([^\]]*)\]\((?!\w+://)[^)]*\)", r"\1", page)


if __name__ == "__main__":
    has_torch = installed_torch() is not None
    of_torch = [] if IS_CROSS and "INFINI_TARGET_TORCH" not in os.environ else devices(find_torch())
    built = [*LIBRARIES, *(one.file.removesuffix(".so") for one in [*modules(), *of_torch])]
    setup(
        long_description=page_for_an_index(),
        long_description_content_type="text/markdown",
        ext_modules=[Extension(extension(library), sources=[]) for library in built],
        cmdclass={"build_ext": NinjaBuild, "build_kernels": BuildKernels, "build_py": BuildPython},
        # Without a torch, pip's build gets the pinned release, and so does the installation; the kernels need none.
        setup_requires=[] if has_torch or "build_kernels" in sys.argv else [PINNED_TORCH],
        install_requires=[f"torch>={OLDEST_TORCH}" if has_torch else PINNED_TORCH],
    )
