"""How a file's name below csrc/ says what is built from it: KINDS, and the build.ninja that follows from it.

setup.py runs ninja on what `ninja_file` returns. A build is the whole, or the part that `make demo` runs: its objects
are objects of the whole too, with the same commands, so that nothing is ever compiled twice.
"""

from __future__ import annotations

import filecmp
import importlib.util
import io
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CSRC = "../../csrc"  # as seen from BUILD, where every command runs: no absolute path gets into the library
OLDEST_TORCH = "2.11"
OLDEST_GCC = 12
STABLE_ABI = "0x020a000000000000"  # 2.10: what the bindings may use; at most the oldest torch supported

# The Python module of compat.infinicore: for the Python that builds, and the interpreters of INFINI_PYTHONS.
MODULE = "_infinicore"
# INFINI_COMPAT=0 leaves out torch_infini/compat with that module: nothing else needs them.
WITH_COMPAT = os.environ.get("INFINI_COMPAT") != "0"
if os.environ.get("INFINI_COMPAT", "1") not in ("", "0", "1"):
    sys.exit(f"torch_infini: INFINI_COMPAT must be 0 or 1, got {os.environ['INFINI_COMPAT']!r}")
# Device `infini`: the stable ABI has none, so it is built for one release of torch, and for those of INFINI_TORCHES,
# the folders `torch` of unpacked wheels. Older releases lack what it overrides.
DEVICE = "libinfini_device"
OLDEST_TORCH_OF_DEVICE = (2, 13)


@dataclass(frozen=True)
class Library:
    """A library that is linked, in an order in which each comes after what it stands on."""

    name: str
    holds: str  # in words, for docs/architecture.md
    needs: tuple[str, ...] = ()  # of ours, in the order of the linker's options
    beside: tuple[str, ...] = ()  # of others, in words
    in_demo: bool = True  # `make demo` links it, with kernels of the levels that this CPU takes


BUILT = (
    Library(
        "libinfinirt",
        "The runtime, with all state: devices, streams, memory, graphs, instruction set, last error",
    ),
    Library("libinfiniop", "The kernels of all ops, and their C interface", ("libinfinirt",)),
    Library("libinfiniccl", "Collectives: shared memory on the CPU, NCCL on CUDA", ("libinfinirt",)),
    Library(
        "libinfinicore_cpp_api",
        "InfiniCore's C++ interface: tensors, allocator, ops, graphs, modules",
        ("libinfiniop", "libinfiniccl", "libinfinirt"),
        in_demo=False,
    ),
    Library(
        "libtorch_infini",
        "The ops in torch: bindings without kernels of their own",
        ("libinfiniop", "libinfiniccl", "libinfinirt"),
        ("torch's stable ABI",),
    ),
    Library(
        MODULE,
        "The Python module of torch_infini.compat.infinicore, for the Python at the build",
        ("libinfinicore_cpp_api", "libinfinirt"),
        ("Python",),
        in_demo=False,
    ),
    Library(
        DEVICE,
        "Device `infini`, for the release of torch at the build",
        ("libinfinirt",),
        ("torch's C++ API",),
        in_demo=False,
    ),
)
LIBRARIES = tuple(library.name for library in BUILT if library.name not in (MODULE, DEVICE))  # every build has them
DEMO_LIBRARIES = tuple(library.name for library in BUILT if library.in_demo)


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

# ---- the levels: instruction sets that kernels are compiled for ----

X86_LEVELS = {
    "baseline": "-O1",  # for CPUs from before 2013: -O3 takes GCC half as long again
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
EMULATED_TILES = {"emulated_amx": "-DINFINI_EMULATED_TILES"}
# Of products of int8 alone: all other kernels would be those of avx2 and avx512 once more.
X86_VNNI = {"avx2_vnni": f"{X86_LEVELS['avx2']} -mavxvnni", "avx512_vnni": f"{X86_LEVELS['avx512']} -mavx512vnni"}

IS_X86 = MACHINE in ("x86_64", "AMD64")
LEVELS = X86_LEVELS if IS_X86 else ARM_LEVELS if MACHINE == "aarch64" else {"baseline": ""}
DOT_LEVELS = {level: flags for level, flags in LEVELS.items() if level != "avx512_bf16"} | (X86_VNNI if IS_X86 else {})
TILES = {**(X86_TILES if IS_X86 else {}), **EMULATED_TILES}


def levels_of(flags: set[str]) -> tuple[str, ...]:
    """The levels whose kernels run at the highest capability of a CPU with these flags of /proc/cpuinfo.

    csrc/infinirt/cpu/capability.cpp makes the choice; where that differs, a build of these says so when it is loaded.
    """
    if not IS_X86:
        if MACHINE != "aarch64":
            return tuple(LEVELS)
        highest = ("neon_bf16",) if {"bf16", "i8mm"} <= flags else ("neon_dotprod",)
        return ("neon", *(highest if {"atomics", "asimddp"} <= flags else ()))
    if not {"avx2", "fma", "f16c"} <= flags:
        return ("baseline",)
    if not {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        return ("avx2", *(("avx2_vnni",) if "avx_vnni" in flags else ()))
    if "avx512_vnni" not in flags:
        return ("avx512",)
    if "avx512_bf16" not in flags:
        return ("avx512", "avx512_vnni")
    tiles = ("avx512_amx",) if {"amx_tile", "amx_bf16", "amx_int8"} <= flags else ()
    return ("avx512", "avx512_vnni", "avx512_bf16", *tiles)


def levels_of_this_cpu() -> tuple[str, ...]:
    """The same for the processor at hand; all levels where Linux does not describe it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return (*{**LEVELS, **DOT_LEVELS}, *X86_TILES)
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return levels_of(set(found[1].split())) if found else (*{**LEVELS, **DOT_LEVELS}, *X86_TILES)


# ---- the kinds of sources ----


@dataclass(frozen=True)
class Kind:
    """A rule for names: the first kind of KINDS whose pattern a path below csrc/ matches is the file's."""

    name: str
    pattern: str  # a regular expression for the whole path
    shown: str  # the pattern as docs/architecture.md shows it
    built: str  # how, in words, for that page
    levels: dict[str, str] = field(default_factory=dict, hash=False)  # compiled once for each, with these flags
    flags: str = ""
    header: str = ""  # of PRECOMPILED; kernels have one for each level
    together: bool = False  # all as one translation unit: where headers and their templates are most of the work
    in_demo: bool = True


KINDS = (
    Kind("cuda", r".*\.cu", "`*.cu`", "by nvcc where CUDA is built, and by g++ for the emulation", in_demo=False),
    Kind("unbuilt", r"(emulation|example)/.*", "`emulation/`, `example/`", "for tests; by readers"),
    Kind(
        "int8 kernel",
        r".*_dot_cpu\.cpp",
        "`*_dot_cpu.cpp` (products of int8)",
        "once for each instruction set that adds something to them: avx2_vnni and avx512_vnni, not avx512_bf16; tests "
        "of a new one are selected by the name of its op (`torch_infini/testing/machine.py`)",
        levels=DOT_LEVELS,
        flags="-DINFINI_KERNEL_SOURCE",
        header="kernels",
    ),
    Kind(
        "kernel",
        r".*_cpu\.cpp",
        "`*_cpu.cpp`",
        "once for each instruction set",
        levels=LEVELS,
        flags="-DINFINI_KERNEL_SOURCE",
        header="kernels",
    ),
    Kind(
        "tiles",
        r".*_tiles\.cpp",
        "`*_tiles.cpp`",
        "for AMX, and for its emulation",
        levels=TILES,
        flags="-DINFINI_KERNEL_SOURCE",
    ),
    Kind("torch ops", r".*_torch\.cpp", "`*_torch.cpp`", "against torch's stable ABI", header="torch"),
    Kind("C interface", r"infiniop/.*_c\.cpp", "`*_c.cpp`", "for libinfiniop alone", header="host", in_demo=False),
    Kind(
        "Python module",
        r"infinicore/python/.*\.cpp",
        "`infinicore/python/*.cpp`",
        "with pybind11, for the Python that builds, as one translation unit",
        together=True,
        in_demo=False,
    ),
    Kind(
        "device",
        r"device/.*\.cpp",
        "`device/*.cpp`",
        "against the C++ API of the torch that is there, as one translation unit",
        together=True,
        in_demo=False,
    ),
    Kind(
        "InfiniCore",
        r"infinicore/.*\.cpp",
        "`infinicore/*.cpp`",
        "as it is; its functions are exported",
        flags="-fvisibility=default",
        header="infinicore",
        in_demo=False,
    ),
    Kind(
        "rules",
        r"(common|infiniop)/.*\.cpp",
        "any other `*.cpp` of `common/` and `infiniop/`",
        "as it is; its functions are exported: an op's rules and table",
        flags="-fvisibility=default",
        header="rules",
    ),
    Kind("host", r".*\.cpp", "any other `*.cpp`", "as it is", header="host"),
)


def kind_of(path: str) -> Kind:
    """The kind of a source, by its path below csrc/."""
    return next(kind for kind in KINDS if re.fullmatch(kind.pattern, path))


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


# Headers that every source of a kind parses, compiled once for all of them: as long as many sources take themselves.
STANDARD = ("algorithm", "array", "cstdint", "cstring", "limits", "memory", "string", "utility", "vector")
PRECOMPILED = {
    "kernels": (
        *(("arm_neon.h",) if MACHINE == "aarch64" else ("immintrin.h",) if IS_X86 else ()),
        *("omp.h", "cmath", "cstdint", "cstring", "limits", "type_traits", "utility"),
        *("level_types.h", "parallel.h", "row_iterator.h", "scratch.h"),
    ),
    "torch": (
        *("torch/csrc/stable/library.h", "torch/csrc/stable/tensor.h"),
        *("array", "optional", "string", "tuple", "type_traits", "vector", "../torch/tensor.h"),
    ),
    "infinicore": (*STANDARD, "../infinicore/ops/call.h"),
    "rules": (*STANDARD, "check.h"),
    "host": (*STANDARD, "atomic", "mutex", "c_api.h"),
}

# ---- what the build is made with ----


def packages_of_environment() -> Iterable[Path]:
    """The folders with the packages of the environment into which we are to be installed.

    pip's isolated builds hide them from `import`: there packages are looked up by path.
    """
    bases = [sys.prefix]
    config = Path(sys.prefix) / "pyvenv.cfg"
    if config.is_file() and "include-system-site-packages = true" in config.read_text():
        bases.append(sys.base_prefix)
    for base in bases:
        for name in ("platlib", "purelib"):
            yield Path(sysconfig.get_path(name, vars={"base": base, "platbase": base}))


def installed(package: str, file: str) -> Path | None:
    """Folder of a package that has this file: the environment's, not one that pip brought for this build alone."""
    spec = importlib.util.find_spec(package)
    if spec and spec.origin and "pip-build-env" not in spec.origin:
        return Path(spec.origin).parent
    places = (place / package for place in packages_of_environment())
    return next((place for place in places if (place / file).is_file()), None)


def package_folder(package: str, file: str) -> Path | None:
    """The same, or else the one that pip brought."""
    spec = importlib.util.find_spec(package)
    return installed(package, file) or (Path(spec.origin).parent if spec and spec.origin else None)


def installed_torch() -> Path | None:
    return installed("torch", "version.py")


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
    return package_folder("torch", "version.py")


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def check_compiler() -> None:
    """Exit with a sentence where the C++ compiler is missing or too old."""
    words = shlex.split(compiler())
    install = f"install g++ >= {OLDEST_GCC} (Debian, Ubuntu: apt install g++) or set CXX"
    if not words or not shutil.which(words[0]):
        sys.exit(f"torch_infini: building needs a C++ compiler, and there is no {compiler()!r}: {install}.")
    macros = subprocess.run([*words, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True)
    if macros.returncode:
        said = (macros.stderr.strip() or "nothing").splitlines()[-1]
        sys.exit(f"torch_infini: {compiler()!r} must be a C++ compiler, but it said: {said}; {install}.")
    defined = dict(re.findall(r"^#define (\w+) (\S+)$", macros.stdout, re.MULTILINE))
    version = int(defined.get("__GNUC__", "0"))
    if "__clang__" not in defined and version < OLDEST_GCC:
        sys.exit(f"torch_infini: building needs g++ >= {OLDEST_GCC}, and {compiler()!r} is g++ {version}: {install}.")


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


@dataclass(frozen=True)
class Variant:
    """A library that is built for one Python, or one release of torch."""

    file: str
    suffix: str  # of its object's name; empty for the Python and the torch that build
    flags: str  # of its sources
    links: str  # options of its linker


def given_paths(variable: str) -> list[str]:
    return [path for path in os.environ.get(variable, "").split(os.pathsep) if path]


def module_flags(include: Path | None = None) -> tuple[str | None, str]:
    """(how the sources of _infinicore are compiled, or None; why it is not built here).

    Args:
        include: The folder of a Python's headers; None: of the one that runs.
    """
    if not WITH_COMPAT:
        return None, "INFINI_COMPAT=0"
    if IS_CROSS and include is None:
        return None, f"a cross build for {MACHINE} has no Python of that machine, and INFINI_PYTHONS names none"
    python = include or Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        return None, f"Python's headers are missing in {python}: install python3-dev"
    if package_folder("pybind11", "include/pybind11/pybind11.h") is None:
        return None, "pybind11 is missing: pip install pybind11"
    # pybind11 by a path of its own (copy_pybind11): pip's isolated builds have another folder each time.
    flags = f"-O1 -isystem pybind11 -isystem {shlex.quote(str(python))}"
    return f"{flags} -fmacro-prefix-map={shlex.quote(str(python))}/=", ""


def modules() -> list[Variant]:
    """The modules to build, that of the Python that runs first; none where it cannot be built."""
    own, _ = module_flags()
    if own is None and not IS_CROSS:
        return []
    # Python's functions stay undefined: the process that imports it has them.
    links = "-Wl,-z,undefs"
    found = []
    if own is not None:
        found = [Variant(f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}", "", own, links)]
    asked = "import sysconfig as s; print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'), sep='\\n')"
    for python in given_paths("INFINI_PYTHONS"):
        try:
            said = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(
                f"torch_infini: INFINI_PYTHONS must name Python interpreters, but {python!r} does not run: {error}"
            )
        include, suffix = said.splitlines()
        # In a cross build the headers of a Python here: its sizes are those of the other machine, with 64 bits too.
        suffix = suffix.replace(platform.machine(), MACHINE)
        flags, reason = module_flags(Path(include))
        if flags is None:
            sys.exit(f"torch_infini: INFINI_PYTHONS: {python} cannot be built for: {reason}")
        if f"{MODULE}{suffix}" not in {one.file for one in found}:
            found.append(Variant(f"{MODULE}{suffix}", suffix.removesuffix(".so"), flags, links))
    return found


def copy_pybind11() -> None:
    """Copy pybind11's headers into BUILD; equal ones keep their time, so that nothing is compiled again."""
    folder = package_folder("pybind11", "include/pybind11/pybind11.h")
    if folder is None:
        return
    source = folder / "include"
    for header in source.rglob("*.h"):
        copy = BUILD / "pybind11" / header.relative_to(source)
        if not copy.is_file() or not filecmp.cmp(header, copy, shallow=False):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(header, copy)


def device_library(torch: Path | None) -> str | None:
    """Name of the library of device `infini` for a torch, `libinfini_device-2.13`; None where that torch is too old."""
    if torch is None:
        return None
    release = runpy.run_path(str(torch / "version.py"))["__version__"].split(".")[:2]
    return f"{DEVICE}-{'.'.join(release)}" if tuple(map(int, release)) >= OLDEST_TORCH_OF_DEVICE else None


def devices(torch: Path | None) -> list[Variant]:
    """The libraries of device `infini` to build: for a torch, and for those of INFINI_TORCHES."""
    found: list[Variant] = []
    for number, folder in enumerate([torch, *map(Path, given_paths("INFINI_TORCHES"))]):
        if number and not (folder and (folder / "version.py").is_file()):
            sys.exit(f"torch_infini: INFINI_TORCHES must name folders `torch` of unpacked wheels, and {folder} is none")
        name = device_library(folder)
        if folder and name and f"{name}.so" not in {one.file for one in found}:
            flags = f"-std=c++20 -O2 -isystem {shlex.quote(str(folder / 'include'))}"
            # Stands on whichever libinfinirt the process has loaded.
            links = f"-L{shlex.quote(str(folder / 'lib'))} -ltorch_cpu -lc10 -pthread"
            found.append(Variant(f"{name}.so", f".{name.partition('-')[2]}" if number else "", flags, links))
    return found


# ---- flags ----

INCLUDE = f"-I{CSRC}/include -I{CSRC}/common -I{CSRC}/infiniop"
CXXFLAGS = (
    "-std=c++17 -O3 -fPIC -fopenmp -fvisibility=hidden -fvisibility-inlines-hidden -Wall -Wextra"
    # GCC 12 sees uninitialised values inside its own AVX-512 headers.
    " -Wno-maybe-uninitialized -Wno-uninitialized"
    f" -Wno-psabi -fno-math-errno -fno-trapping-math -ffp-contract=off {INCLUDE}"
)


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


# ---- build.ninja ----


def write_if_changed(path: Path, text: str) -> None:
    """Keep the file's time where it has this text: what is made from it is not made again."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@dataclass(frozen=True)
class Compiled:
    """An object of build.ninja."""

    name: str
    kind: Kind
    level: str  # of kernels, else ""

    def is_in_demo(self, levels: tuple[str, ...]) -> bool:
        return self.kind.in_demo and (not self.level or self.level in levels)


class NinjaFile:
    """A build.ninja as it is written: rules, then objects by library, then what is linked from them."""

    def __init__(self, torch: Path | None, nvcc: str | None, demo_levels: tuple[str, ...]) -> None:
        try:
            from ninja import Writer  # not at the top: `pip install -e .` without a build needs no ninja
        except ImportError:
            sys.exit("torch_infini: building needs the Python package ninja: run `pip install ninja`.")
        self.text = io.StringIO()
        self.writer = Writer(self.text, width=10**6)
        self.torch, self.nvcc, self.demo_levels = torch, nvcc, demo_levels
        self.variants = {MODULE: modules(), DEVICE: devices(torch)}
        files = [variant.file for variants in self.variants.values() for variant in variants]
        self.objects: dict[str, list[Compiled]] = {library: [] for library in (*LIBRARIES, *files)}
        torch_include = f"-isystem {shlex.quote(str(torch / 'include'))}" if torch else ""
        # Flags of kinds that depend on what is installed; None: this build leaves the kind out.
        self.flags: dict[str, str | None] = {
            "torch ops": f"{torch_include} -DTORCH_TARGET_VERSION={STABLE_ABI}" if torch else None,
            "device": "" if self.variants[DEVICE] else None,  # each variant has its own
            "Python module": "" if self.variants[MODULE] else None,
            "cuda": None,  # below: by nvcc, and for the emulation
            "unbuilt": None,
        }
        self.headers: dict[tuple[str, str], str] = {}  # by kind and level: the header that stands precompiled

    def rules(self) -> None:
        archs = (os.environ.get("TORCH_CUDA_ARCH_LIST") or "8.0;9.0+PTX").replace(" ", ";").split(";")
        writer = self.writer
        writer.variable("cxx", compiler())
        writer.variable("nvcc", self.nvcc)
        writer.variable("cxxflags", f"{CXXFLAGS} {os.environ.get('CXXFLAGS', '')}")
        writer.variable("cudaflags", cuda_flags(archs))
        # $ORIGIN: the libraries find each other in their own folder.
        ldflags = os.environ.get("LDFLAGS", "")
        writer.variable("ldflags", f"-shared -fopenmp -Wl,-z,defs -Wl,-rpath,'$$ORIGIN' {ldflags}")
        writer.variable("exports", f"{CSRC}/exports.map")
        compile_ = "$cxx $cxxflags $flags -MMD -MF $out.d -c $in -o $out"
        writer.rule("cxx", compile_, description="CXX $out", depfile="$out.d", deps="gcc")
        # -MD: also system headers, of which a precompiled one must be no older copy.
        compile_ = "$cxx $cxxflags $flags -x c++-header -MD -MF $out.d -c $in -o $out"
        writer.rule("precompile", compile_, description="PCH $out", depfile="$out.d", deps="gcc")
        compile_ = "$nvcc $cudaflags -MD -MF $out.d -c $in -o $out"
        writer.rule("nvcc", compile_, description="NVCC $out", depfile="$out.d", deps="gcc")
        link = "$cxx $in -o $out -Wl,-soname,$soname -Wl,--version-script=$exports $ldflags $libs"
        writer.rule("link", link, description="LINK $out")

    def precompile(self, kind: Kind, level: str, flags: str) -> str:
        """The header that includes those of a kind, which compilers find precompiled beside it."""
        if not kind.header or level in X86_VNNI:  # of which a level has two sources
            return ""
        if (kind.header, level) not in self.headers:
            name = f"{kind.header}.{level}" if level else kind.header
            header = BUILD / "precompiled" / f"{name}.h"
            # The lowest level of x86-64 uses no intrinsics.
            headers = (one for one in PRECOMPILED[kind.header] if one != "immintrin.h" or level != "baseline")
            text = "".join(f"#include <{one}>\n" for one in headers)
            write_if_changed(header, text)
            self.writer.build(
                f"precompiled/{name}.h.gch", "precompile", f"precompiled/{name}.h", variables={"flags": flags}
            )
            self.headers[kind.header, level] = f"precompiled/{name}.h"
        return self.headers[kind.header, level]

    def compile_(
        self, rule: str, source: Path, kind: Kind, suffix: str = "", level: str = "", flags: str = "", header: str = ""
    ) -> None:
        path = source.relative_to(ROOT / "csrc")
        name = str(path.with_suffix("")).replace(os.sep, ".") + suffix + ".o"
        flags = f"{flags} -include {header}" if header else flags
        implicit = [f"{header}.gch"] if header else None
        self.writer.build(name, rule, f"{CSRC}/{path}", implicit=implicit, variables={"flags": flags.strip()})
        for library in libraries_of(path):
            self.objects[library].append(Compiled(name, kind, level))

    def compile_for_host(self) -> None:
        """Every C++ source, for each of its kind's levels."""
        together: dict[Kind, list[Path]] = {}
        for source in sorted((ROOT / "csrc").rglob("*.cpp")):
            kind = kind_of(source.relative_to(ROOT / "csrc").as_posix())
            installed_flags = self.flags.get(kind.name, "")
            if installed_flags is None:
                continue
            if kind.together:
                together.setdefault(kind, []).append(source)
                continue
            for level, level_flags in (kind.levels or {"": ""}).items():
                flags = f"{level_flags} {kind.flags} {installed_flags}".strip()
                header = self.precompile(kind, level, flags)
                self.compile_("cxx", source, kind, f".{level}" if level else "", level, flags, header)
        for kind, sources in together.items():
            self.compile_together(kind, sources)

    def compile_together(self, kind: Kind, sources: list[Path]) -> None:
        """Some sources as one: a file that includes them all."""
        paths = [source.relative_to(ROOT / "csrc") for source in sources]
        folder = os.path.commonpath([path.parent for path in paths])
        name = folder.replace(os.sep, ".")
        text = "".join(f'#include "../{CSRC}/{path.as_posix()}"\n' for path in paths)
        write_if_changed(BUILD / "together" / f"{name}.cpp", text)
        for variant in self.variants[libraries_of(paths[0])[0]]:
            file, flags = f"{name}{variant.suffix}.o", f"{kind.flags} {variant.flags}".strip()
            self.writer.build(file, "cxx", f"together/{name}.cpp", variables={"flags": flags})
            self.objects[variant.file].append(Compiled(file, kind, ""))

    def compile_capability(self) -> None:
        """The choice of the level, in a build that has some of them only: instead of the whole build's."""
        source = ROOT / "csrc" / "infinirt" / "cpu" / "capability.cpp"
        if not self.demo_levels or not source.is_file():
            return
        path = source.relative_to(ROOT / "csrc")
        name = "infinirt.cpu.capability"
        self.objects["libinfinirt"] = [some for some in self.objects["libinfinirt"] if some.name != f"{name}.o"]
        levels = f"-DINFINI_BUILT_LEVELS='\"{' '.join(self.demo_levels)}\"'"
        kind = kind_of(path.as_posix())
        header = self.precompile(kind, "", "")
        self.compile_("cxx", source, kind, ".of_demo", flags=levels, header=header)

    def compile_cuda(self) -> None:
        if self.nvcc:
            for source in cuda_sources():
                self.compile_("nvcc", source, KINDS[0], ".cuda")

    def compile_emulated(self) -> None:
        """The CUDA kernels compiled for the host, for tests: INFINI_EMULATION=1, csrc/emulation."""
        for source in [*sorted((ROOT / "csrc" / "emulation").glob("*.cpp")), *cuda_sources()]:
            flags = f"-O2 -DINFINI_EMULATION -I{CSRC}/emulation -ffp-contract=fast -Wno-unknown-pragmas -x c++"
            flags += " -fsanitize=alignment -fno-sanitize-recover=alignment"  # emulator.cpp has what it calls
            self.compile_("cxx", source, KINDS[0], ".emulated", flags=flags)

    def kernels(self) -> None:
        """The target `kernels`: every object that needs no torch, of the demo if it is that which is built."""
        wanted = {
            some.name
            for library in (*LIBRARIES, *(variant.file for variant in self.variants[MODULE]))
            for some in self.objects[library]
            if some.kind.name != "torch ops" and self.is_linked(some)
        }
        self.writer.build("kernels", "phony", sorted(wanted))

    def is_linked(self, some: Compiled) -> bool:
        return not self.demo_levels or some.is_in_demo(self.demo_levels)

    def link(self, folder: str = "") -> list[str]:
        """Link all libraries into a folder; their files there."""
        assert self.torch is not None
        cudart = cudart_flags(self.nvcc) if self.nvcc and not folder else ""
        at = f"-L{folder.rstrip('/') or '.'}"
        torch_lib = shlex.quote(str(self.torch / "lib"))
        # Those with kernels or runtime calls get a copy of cudart each; what these share, the driver keeps.
        options = {
            # Stays after dlclose(): its streams' threads run in it.
            "libinfinirt": f"-pthread -Wl,-z,nodelete {cudart}",
            "libinfiniop": f"-Wl,-Bsymbolic-functions {cudart}",
            "libinfiniccl": "-ldl -pthread",
            "libinfinicore_cpp_api": "-pthread",
            "libtorch_infini": f"-L{torch_lib} -ltorch_cpu -lc10 -ldl",
        }
        exports = {"libinfiniop": "infiniop", "libinfinicore_cpp_api": "infinicore", MODULE: "infinicore/python"}
        libraries = DEMO_LIBRARIES if self.demo_levels else (*LIBRARIES, MODULE, *(() if folder else (DEVICE,)))
        linked = []
        for library in libraries:
            needs = next(one.needs for one in BUILT if one.name == library)
            ours = [at, *(f"-l{name.removeprefix('lib')}" for name in needs)] if needs else []
            below = [f"{folder}{name}.so" for name in needs]
            if library in self.variants:
                files_of = {one.file: (self.objects[one.file], one.links) for one in self.variants[library]}
            else:
                files_of = {f"{library}.so": (self.objects[library], options[library])}
            for file, (compiled, option) in files_of.items():
                files = [some.name for some in compiled if self.is_linked(some)]
                if not files and library in self.variants:  # there are no sources
                    continue
                variables = {"libs": " ".join([*ours, option]).strip(), "soname": file}
                if library in exports:
                    variables["exports"] = f"{CSRC}/{exports[library]}/exports.map"
                elif folder:
                    variables["exports"] = f"{CSRC}/emulation/exports.map"
                self.writer.build(f"{folder}{file}", "link", files, implicit=below, variables=variables)
                linked.append(f"{folder}{file}")
        return linked


def ninja_file(torch: Path | None, nvcc: str | None, demo_levels: tuple[str, ...] = ()) -> str:
    """The text of build.ninja.

    Args:
        torch: The folder of the torch to build against; without one there is the target `kernels` alone, all objects
            that need none.
        nvcc: The CUDA compiler; None builds no CUDA kernels.
        demo_levels: Link what the demo needs, with the kernels of these levels; (): the whole.
    """
    file = NinjaFile(torch, nvcc, demo_levels)
    file.rules()
    file.compile_for_host()
    file.compile_capability()
    file.kernels()
    if torch is None:
        return file.text.getvalue()
    host_objects = {library: list(some) for library, some in file.objects.items()}
    file.compile_cuda()
    file.writer.default(file.link())
    # The emulated libraries are always there: ninja removes objects that its file does not name.
    file.objects = host_objects
    file.compile_emulated()
    if not demo_levels:
        emulated = file.link("emulated/")
        if os.environ.get("INFINI_EMULATION") == "1":
            file.writer.default(emulated)
    return file.text.getvalue()
