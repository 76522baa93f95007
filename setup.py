"""Builds the libraries of torch_infini/lib with ninja: in parallel, and only what changed.

`setup.py build_kernels` compiles what needs no torch: the set-up calls it while torch is downloaded.
A cross compiler as CXX builds in build/MACHINE, and links there against the torch of that machine, INFINI_TARGET_TORCH.

Sources are found by name below csrc/:  *_cpu.cpp is compiled once for each instruction set, *_dot_cpu.cpp for those
that add VNNI alone as well, *_tiles.cpp for the tile registers of AMX and for their emulation, *_torch.cpp against the
LibTorch stable ABI, *.cu with nvcc where CUDA is chosen, infinicore/python/*.cpp with pybind11 for the Python that
builds, device/*.cpp against the C++ API of the torch that is there, any other *.cpp as it is. See CONTRIBUTING.md.
"""

import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def target_machine() -> str:
    """The machine that CXX compiles for, as `uname -m` has it; this one where the compiler does not tell."""
    compiler = shlex.split(os.environ.get("CXX", ""))
    if compiler and shutil.which(compiler[0]):
        said = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True)
        if said.returncode == 0 and said.stdout.count("-") >= 2:
            return said.stdout.partition("-")[0]
    return platform.machine()


MACHINE = target_machine()
IS_CROSS = platform.machine() != MACHINE
BUILD = ROOT / "build" / (MACHINE if IS_CROSS else "native")
CSRC = "../../csrc"  # as seen from BUILD, where every command runs: no absolute path gets into the library
PINNED_TORCH = "torch==2.13.0"  # installed where there is no torch; docs/install.md
OLDEST_TORCH = "2.11"
STABLE_ABI = "0x020a000000000000"  # 2.10: what the bindings may use; at most the oldest torch supported

# The runtime, which has all state; the kernels and the ops' C interface; collectives; InfiniCore's C++
# interface; the ops in torch.
LIBRARIES = ("libinfinirt", "libinfiniop", "libinfiniccl", "libinfinicore_cpp_api", "libtorch_infini")
# What tells compilers about them: files of csrc/, and the folders of lib/ where they are looked for.
DESCRIPTIONS = {"infini.pc": "pkgconfig", "infinicore.pc": "pkgconfig", "infini-config.cmake": "cmake/infini"}
# The Python module of torch_infini.infinicore, for one Python: a wheel holds the one of the Python that built it.
MODULE = "_infinicore"
MODULE_FILE = f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
# Device `infini`, for one release of torch: the stable ABI has no device. Older releases lack what it overrides.
DEVICE = "libinfini_device"
OLDEST_TORCH_OF_DEVICE = (2, 13)
X86_LEVELS = {
    "baseline": "",
    "avx2": "-mavx2 -mfma -mf16c",
    "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl",
    "avx512_bf16": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vnni",
}
ARM_LEVELS = {
    "neon": "-march=armv8-a",
    "neon_dotprod": "-march=armv8.2-a+dotprod",
    "neon_bf16": "-march=armv8.2-a+dotprod+bf16+i8mm",
}
X86_TILES = {"avx512_amx": f"{X86_LEVELS['avx512_bf16']} -mamx-tile -mamx-bf16 -mamx-int8"}
EMULATED_TILES = "-DINFINI_EMULATED_TILES"
# Of products of int8 alone: all other kernels would be those of avx2 and avx512 once more.
X86_VNNI = {"avx2_vnni": f"{X86_LEVELS['avx2']} -mavxvnni", "avx512_vnni": f"{X86_LEVELS['avx512']} -mavx512vnni"}

# Headers that a group of sources parses anew for each, compiled once: as long as many of the kernels take themselves.
PRECOMPILED = {
    "kernels": (
        "arm_neon.h" if MACHINE == "aarch64" else "immintrin.h",
        "omp.h",
        "cmath",
        "cstdint",
        "cstring",
        "limits",
        "type_traits",
        "utility",
    ),
    "torch": (
        "torch/csrc/stable/library.h",
        "torch/csrc/stable/tensor.h",
        "optional",
        "tuple",
        "type_traits",
        "vector",
    ),
    "device": ("ATen/ATen.h", "torch/library.h"),
    "python": ("pybind11/pybind11.h", "pybind11/stl.h", "functional", "memory", "optional", "string", "vector"),
}


def installed_torch() -> Path | None:
    """Folder of the torch that the environment has into which we are to be installed.

    pip's isolated builds hide that environment from `import` (and may have another torch): there it is looked up
    by path.
    """
    spec = importlib.util.find_spec("torch")
    if spec and spec.origin and "pip-build-env" not in spec.origin:
        return Path(spec.origin).parent
    bases = [sys.prefix]
    config = Path(sys.prefix) / "pyvenv.cfg"
    if config.is_file() and "include-system-site-packages = true" in config.read_text():
        bases.append(sys.base_prefix)
    places = [
        Path(sysconfig.get_path(name, vars={"base": base, "platbase": base})) / "torch"
        for base in bases
        for name in ("platlib", "purelib")
    ]
    return next((place for place in places if (place / "version.py").is_file()), None)


def find_torch() -> Path | None:
    """Folder of the torch to build against: the environment's, else the one that pip brought for this build.

    In a cross build the target's, INFINI_TARGET_TORCH: the folder `torch` of its unpacked wheel.
    """
    if IS_CROSS:
        target = Path(os.environ.get("INFINI_TARGET_TORCH", "")).resolve()
        if not (target / "version.py").is_file():
            sys.exit(
                f"torch_infini: {os.environ['CXX']} compiles for {MACHINE}: INFINI_TARGET_TORCH must be the folder "
                f"`torch` of an unpacked torch wheel for {MACHINE} (`pip download --platform` gets one)."
            )
        return target
    spec = importlib.util.find_spec("torch")
    return installed_torch() or (Path(spec.origin).parent if spec and spec.origin else None)


def cuda_sources() -> list[Path]:
    return sorted((ROOT / "csrc").rglob("*.cu"))


def choose_cuda(torch_cuda: str | None) -> tuple[str | None, str]:
    """(nvcc or None, the reason in words)."""
    if not cuda_sources():
        return None, "there are no CUDA kernels yet"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc")
    if os.environ.get("FORCE_CUDA") == "1":
        if not nvcc:
            sys.exit("torch_infini: FORCE_CUDA=1, but no nvcc was found: put it on PATH or set CUDA_HOME.")
        if torch_cuda:
            return nvcc, "FORCE_CUDA=1"
        return nvcc, "FORCE_CUDA=1; this torch has no CUDA: only one that has it, and the C libraries, use the kernels"
    if not torch_cuda:
        return None, "this torch has no CUDA"
    return (nvcc, f"torch has CUDA {torch_cuda}, nvcc is {nvcc}") if nvcc else (None, "no nvcc found")


def module_flags() -> tuple[str | None, str]:
    """(how the sources of _infinicore are compiled, or None; why it cannot be built here)."""
    if IS_CROSS:
        return None, f"a cross build for {MACHINE} has no Python of that machine"
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        return None, f"Python's headers are missing in {python}: install python3-dev"
    if not importlib.util.find_spec("pybind11"):
        return None, "pybind11 is missing: pip install pybind11"
    import pybind11

    flags = ["-O2"]
    for folder in (str(python), pybind11.get_include()):
        flags += [f"-isystem {shlex.quote(folder)}", f"-fmacro-prefix-map={shlex.quote(folder)}/="]
    return " ".join(flags), ""


def device_library(torch: Path | None) -> str | None:
    """Name of the library of device `infini` for a torch, `libinfini_device-2.13`; None where that torch is too old."""
    if torch is None:
        return None
    release = runpy.run_path(str(torch / "version.py"))["__version__"].split(".")[:2]
    return f"{DEVICE}-{'.'.join(release)}" if tuple(map(int, release)) >= OLDEST_TORCH_OF_DEVICE else None


class BuildKernels(Command):
    """Compiles every source that needs no torch; links nothing."""

    user_options = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        run_ninja(ninja_file(None, None), "kernels")


class NinjaBuild(build_ext):
    """Writes build/native/build.ninja and runs it."""

    def get_ext_filename(self, fullname: str) -> str:
        *folders, name = fullname.split(".")  # plain libraries, which know no Python, and the module
        if name == DEVICE:  # the release of torch has a dot, which an extension's name cannot have
            return str(Path(*folders, f"{device_library(find_torch())}.so"))
        return str(Path(*folders, MODULE_FILE if name == MODULE else f"{name}.so"))

    def run(self) -> None:
        if os.environ.get("INFINI_BUILD") == "0":
            return
        build()
        if IS_CROSS and self.inplace:  # torch_infini/lib is for this machine; INFINI_LIBRARIES names the other's there
            print(f"torch_infini: the libraries for {MACHINE} are in {BUILD.relative_to(ROOT)}", flush=True)
            return
        super().run()
        # The C headers and what tells compilers about them.
        package = (ROOT if self.inplace else Path(self.build_lib)) / "torch_infini"
        shutil.copytree(ROOT / "csrc" / "include", package / "include", dirs_exist_ok=True)
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


def build() -> None:
    """Bring the libraries in BUILD up to date."""
    torch = find_torch()
    if torch is None:
        sys.exit(f"torch_infini: building needs torch >= {OLDEST_TORCH}: run `pip install {PINNED_TORCH}` first.")
    version = runpy.run_path(str(torch / "version.py"))
    if tuple(int(part) for part in version["__version__"].split(".")[:2]) < tuple(map(int, OLDEST_TORCH.split("."))):
        sys.exit(
            f"torch_infini: building needs torch >= {OLDEST_TORCH}, found {version['__version__']}: "
            f"run `pip install {PINNED_TORCH}`."
        )
    nvcc, reason = (None, f"a cross build for {MACHINE}") if IS_CROSS else choose_cuda(version.get("cuda"))
    print(f"torch_infini: building for CPU{' and CUDA' if nvcc else ' only'} ({reason})", flush=True)
    flags, reason = module_flags()
    if flags is None:
        print(f"torch_infini: building without torch_infini.infinicore ({reason})", flush=True)
    run_ninja(ninja_file(torch, nvcc))
    # Objects of sources that are gone go too: the tests look at all that lie there.
    subprocess.run([*ninja_command(), "-t", "cleandead"], stdout=subprocess.DEVNULL)


def ninja_command() -> list[str]:
    ninja = shutil.which("ninja")
    return [*([ninja] if ninja else [sys.executable, "-m", "ninja"]), "-C", str(BUILD)]


def run_ninja(text: str, *targets: str) -> None:
    """Build with a build.ninja of this text, and say how far it is; exits if it fails."""
    (BUILD / "emulated").mkdir(parents=True, exist_ok=True)
    (BUILD / "build.ninja").write_text(text)
    jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
    environment = {**os.environ, "NINJA_STATUS": f"{MARK}%f/%t "}
    command = [*ninja_command(), *jobs, *targets]
    ninja = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, errors="replace")
    assert ninja.stdout is not None
    progress = Progress()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for line in ninja.stdout:
            if line.startswith(MARK):
                progress.done(*line.removeprefix(MARK).split()[:2])
            elif not line.startswith(("ninja: Entering directory", "ninja: no work to do")):
                progress.clear()
                print(line, end="", flush=True)
    finally:
        if sys.exc_info()[0]:
            ninja.terminate()
    if ninja.wait():
        progress.clear()
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


def libraries_of(path: Path) -> tuple[str, ...]:
    """The libraries that a source (relative to csrc/) is linked into."""
    if path.stem == "emulator":
        return LIBRARIES
    if path.parts[0] == "common":  # libtorch_infini uses the copy of libinfiniop
        return ("libinfinirt", "libinfiniop", "libinfiniccl")
    if path.parts[0] in ("infinirt", "emulation"):
        return ("libinfinirt",)
    if path.parts[0] == "infiniccl":
        return ("libinfiniccl",)
    if path.parts[:2] == ("infinicore", "python"):
        return (MODULE,)
    if path.parts[0] == "device":
        return (DEVICE,)
    if path.parts[0] == "infinicore":
        return ("libinfinicore_cpp_api",)
    if path.parts[0] == "torch" or path.stem.endswith("_torch"):
        return ("libtorch_infini",)
    return ("libinfiniop",)


def is_exported(path: Path) -> bool:
    """Whether others call the C++ functions of a source: InfiniCore's; an op's rules and table, and what they share."""
    return path.parts[0] in ("common", "infiniop", "infinicore") and not path.stem.endswith(
        ("_c", "_cpu", "_tiles", "_torch")
    )


def ninja_file(torch: Path | None, nvcc: str | None) -> str:
    """The text of build.ninja; without a torch only of the target `kernels`, all objects that need none."""
    torch_flags = f"-isystem {shlex.quote(str(torch / 'include'))} -DTORCH_TARGET_VERSION={STABLE_ABI}" if torch else ""
    x86 = MACHINE in ("x86_64", "AMD64")
    levels = X86_LEVELS if x86 else ARM_LEVELS if MACHINE == "aarch64" else {"baseline": ""}
    dot_levels = {**levels, **(X86_VNNI if x86 else {})}
    tiles = {**(X86_TILES if x86 else {}), "emulated_amx": EMULATED_TILES}
    archs = (os.environ.get("TORCH_CUDA_ARCH_LIST") or "8.0;9.0+PTX").replace(" ", ";").split(";")
    lines = [
        f"cxx = {os.environ.get('CXX', 'g++')}",
        f"nvcc = {nvcc}",
        "cxxflags = -std=c++17 -O3 -fPIC -fopenmp -fvisibility=hidden -fvisibility-inlines-hidden -Wall -Wextra"
        # GCC 12 sees uninitialised values inside its own AVX-512 headers.
        " -Wno-maybe-uninitialized -Wno-uninitialized"
        f" -Wno-psabi -fno-math-errno -fno-trapping-math -ffp-contract=off {INCLUDE} {os.environ.get('CXXFLAGS', '')}",
        f"cudaflags = {cuda_flags(archs)}",
        # $ORIGIN: the libraries find each other in their own folder.
        f"ldflags = -shared -fopenmp -Wl,-z,defs -Wl,-rpath,'$$ORIGIN' {os.environ.get('LDFLAGS', '')}",
        f"exports = {CSRC}/exports.map",
        "rule cxx\n  command = $cxx $cxxflags $flags -MMD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc"
        "\n  description = CXX $out",
        # -MD: also system headers, of which a precompiled one must be no older copy.
        "rule precompile\n  command = $cxx $cxxflags $flags -x c++-header -MD -MF $out.d -c $in -o $out"
        "\n  depfile = $out.d\n  deps = gcc\n  description = PCH $out",
        "rule nvcc\n  command = $nvcc $cudaflags -MD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc"
        "\n  description = NVCC $out",
        "rule link\n  command = $cxx $in -o $out -Wl,-soname,$soname -Wl,--version-script=$exports $ldflags"
        " $libs\n  description = LINK $out",
    ]
    objects: dict[str, list[str]] = {library: [] for library in (*LIBRARIES, MODULE, DEVICE)}
    device = device_library(torch)
    device_flags = f"-std=c++20 -O2 -isystem {shlex.quote(str(torch / 'include'))}" if torch else ""
    with_pybind11, _ = module_flags()

    def precompile(name: str, headers: tuple[str, ...], flags: str) -> str:
        """The header that includes these, which compilers find precompiled beside it."""
        header = BUILD / "precompiled" / f"{name}.h"
        text = "".join(f"#include <{name}>\n" for name in headers)
        if not header.is_file() or header.read_text() != text:
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(text)
        lines.append(f"build precompiled/{name}.h.gch: precompile precompiled/{name}.h\n  flags = {flags}")
        return f"precompiled/{name}.h"

    def compile_(rule: str, source: Path, suffix: str = "", flags: str = "", header: str = "") -> None:
        path = source.relative_to(ROOT / "csrc")
        name = str(path.with_suffix("")).replace(os.sep, ".") + suffix + ".o"
        needs, flags = (f" | {header}.gch", f"{flags} -include {header}") if header else ("", flags)
        lines.append(f"build {name}: {rule} {CSRC}/{path}{needs}\n  flags = {flags}")
        for library in libraries_of(path):
            objects[library].append(name)

    headers = {
        level: precompile(f"kernels.{level}", PRECOMPILED["kernels"], flags) for level, flags in levels.items() if flags
    }
    if torch:
        headers["torch"] = precompile("torch", PRECOMPILED["torch"], torch_flags)
    if device:
        headers["device"] = precompile("device", PRECOMPILED["device"], device_flags)
    if with_pybind11 and any((ROOT / "csrc" / "infinicore" / "python").glob("*.cpp")):
        headers["python"] = precompile("python", PRECOMPILED["python"], with_pybind11)
    emulation, examples = ROOT / "csrc" / "emulation", (ROOT / "csrc" / "example").glob("*.cpp")
    for source in sorted(set((ROOT / "csrc").rglob("*.cpp")) - set(emulation.iterdir()) - set(examples)):
        if source.stem.endswith("_cpu"):
            for level, flags in (dot_levels if source.stem.endswith("_dot_cpu") else levels).items():
                compile_("cxx", source, f".{level}", flags, headers.get(level, ""))
        elif source.stem.endswith("_tiles"):
            for level, flags in tiles.items():
                compile_("cxx", source, f".{level}", flags)
        elif libraries_of(source.relative_to(ROOT / "csrc")) == (MODULE,):
            if with_pybind11:
                compile_("cxx", source, flags=with_pybind11, header=headers["python"])
        elif libraries_of(source.relative_to(ROOT / "csrc")) == (DEVICE,):
            if device:
                compile_("cxx", source, flags=device_flags, header=headers["device"])
        elif not source.stem.endswith("_torch"):
            exported = is_exported(source.relative_to(ROOT / "csrc"))
            compile_("cxx", source, flags="-fvisibility=default" if exported else "")
        elif torch:
            compile_("cxx", source, flags=torch_flags, header=headers["torch"])
    kernels = sorted(
        {name for library in {*LIBRARIES, MODULE} for name in objects[library] if not name.endswith("_torch.o")}
    )
    lines.append(f"build kernels: phony {' '.join(kernels)}")
    if torch is None:
        return "\n".join(lines) + "\n"
    host_objects = {library: list(names) for library, names in objects.items()}
    if nvcc:
        for source in cuda_sources():
            compile_("nvcc", source, ".cuda")
    # Those with kernels or runtime calls get a copy of cudart each; what these share, the driver keeps.
    cudart = cudart_flags(nvcc) if nvcc else ""
    uses = {
        "libinfinirt": "-pthread -Wl,-z,nodelete",  # stays after dlclose(): its streams' threads run in it
        "libinfiniop": "-L. -linfinirt -Wl,-Bsymbolic-functions",
        "libinfiniccl": "-L. -linfinirt -ldl -pthread",
        "libinfinicore_cpp_api": "-L. -linfiniop -linfiniccl -linfinirt -pthread",
        "libtorch_infini": "-L. -linfiniop -linfiniccl -linfinirt"
        f" -L{shlex.quote(str(torch / 'lib'))} -ltorch_cpu -lc10 -ldl",
    }
    all_below = ("libinfiniop.so", "libinfiniccl.so", "libinfinirt.so")
    stands_on = {"libinfinirt": (), "libinfinicore_cpp_api": all_below, "libtorch_infini": all_below}
    exports = {
        library: f"\n  exports = {CSRC}/{folder}/exports.map"
        for library, folder in (("libinfiniop", "infiniop"), ("libinfinicore_cpp_api", "infinicore"))
    }

    def needs_of(library: str, folder: str = "") -> str:
        needed = stands_on.get(library, ("libinfinirt.so",))
        return " |" + "".join(f" {folder}{name}" for name in needed) if needed else ""

    for library in LIBRARIES:
        libs = f"{uses[library]} {cudart}" if library in ("libinfinirt", "libinfiniop") else uses[library]
        lines.append(
            f"build {library}.so: link {' '.join(objects[library])}{needs_of(library)}\n"
            f"  libs = {libs}\n  soname = {library}.so{exports.get(library, '')}"
        )
    lines.append(f"default {' '.join(f'{library}.so' for library in LIBRARIES)}")

    def link_module(folder: str) -> None:
        if objects[MODULE]:  # Python's functions stay undefined: the process that imports it has them
            lines.append(
                f"build {folder}{MODULE_FILE}: link {' '.join(objects[MODULE])} | {folder}libinfinicore_cpp_api.so"
                f"\n  libs = -L./{folder} -linfinicore_cpp_api -linfinirt -Wl,-z,undefs\n  soname = {MODULE_FILE}"
                f"\n  exports = {CSRC}/infinicore/python/exports.map"
            )

    link_module("")
    if device:  # stands on whichever libinfinirt the process has loaded
        lines.append(
            f"build {device}.so: link {' '.join(objects[DEVICE])} | libinfinirt.so\n"
            f"  libs = -L. -linfinirt -L{shlex.quote(str(torch / 'lib'))} -ltorch_cpu -lc10 -pthread\n"
            f"  soname = {device}.so\ndefault {device}.so"
        )
    modules = [MODULE_FILE] if objects[MODULE] else []
    lines += [f"default {name}" for name in modules]

    # The same libraries with the CUDA kernels compiled for the host, for tests: INFINI_EMULATION=1, csrc/emulation.
    objects = host_objects
    for source in [*sorted(emulation.glob("*.cpp")), *cuda_sources()]:
        flags = f"-O2 -DINFINI_EMULATION -I{CSRC}/emulation -ffp-contract=fast -Wno-unknown-pragmas -x c++"
        flags += " -fsanitize=alignment -fno-sanitize-recover=alignment"  # emulator.cpp has what it calls
        compile_("cxx", source, ".emulated", flags)
    for library in LIBRARIES:
        lines.append(
            f"build emulated/{library}.so: link {' '.join(objects[library])}{needs_of(library, 'emulated/')}\n"
            f"  libs = -Lemulated {uses[library]}\n  soname = {library}.so"
            + exports.get(library, f"\n  exports = {CSRC}/emulation/exports.map")
        )
    link_module("emulated/")  # always: what a build does not know, it removes
    if os.environ.get("INFINI_EMULATION") == "1":
        names = [*(f"{library}.so" for library in LIBRARIES), *modules]
        lines.append(f"default {' '.join(f'emulated/{name}' for name in names)}")
    return "\n".join(lines) + "\n"


INCLUDE = f"-I{CSRC}/include -I{CSRC}/common -I{CSRC}/infiniop"


def cuda_flags(archs: list[str]) -> str:
    """What every CUDA source is compiled with; the defines are those of torch's own CUDAExtension."""
    halves = ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")
    defines = " ".join(f"-D__CUDA_NO_{name}__" for name in halves)
    return f"-std=c++17 -O3 -Xcompiler -fPIC,-fvisibility=hidden {defines} {INCLUDE} {gencode(archs)}"


def cudart_flags(nvcc: str) -> str:
    """How to link the CUDA runtime: nvcc itself says where its toolkit keeps it."""
    command = [nvcc, "-dryrun", "-x", "cu", os.devnull, "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    folders = re.search(r"^#\$ LIBRARIES=(.*)$", said, re.MULTILINE)
    return f"{folders.group(1).strip() if folders else ''} -lcudart_static -ldl -lrt -lpthread"


def gencode(archs: list[str]) -> str:
    """nvcc's -gencode flags for a TORCH_CUDA_ARCH_LIST such as ["8.0", "9.0+PTX"]."""
    flags = []
    for arch in filter(None, archs):
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode arch=compute_{number},code=compute_{number}")
    return " ".join(flags)


def page_for_an_index() -> str:
    """README.md for a package index, which has no docs/: relative links become their text, pictures go."""
    page = re.sub(r"!\[[^\]]*\]\((?!\w+://)[^)]*\)\n*", "", (ROOT / "README.md").read_text())
    return re.sub(r"\[([^\]]*)\]\((?!\w+://)[^)]*\)", r"\1", page)


if __name__ == "__main__":
    has_torch = installed_torch() is not None
    built = (*LIBRARIES, MODULE) if module_flags()[0] is not None else LIBRARIES
    if not (IS_CROSS and "INFINI_TARGET_TORCH" not in os.environ) and device_library(find_torch()):
        built = (*built, DEVICE)
    setup(
        long_description=page_for_an_index(),
        long_description_content_type="text/markdown",
        ext_modules=[Extension(f"torch_infini.lib.{library}", sources=[]) for library in built],
        cmdclass={"build_ext": NinjaBuild, "build_kernels": BuildKernels},
        # Without a torch, pip's build gets the pinned release, and so does the installation; the kernels need none.
        setup_requires=[] if has_torch or "build_kernels" in sys.argv else [PINNED_TORCH],
        install_requires=[f"torch>={OLDEST_TORCH}" if has_torch else PINNED_TORCH],
    )
