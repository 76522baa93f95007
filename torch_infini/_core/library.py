"""Finds and loads libtorch_infini.so and with it libinfinirt: after this import, every op has its kernels.

What does not fit (torch, processor, a missing build) ends in one ImportError sentence that says what to do.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import torch

OLDEST_TORCH = (2, 11)
ROOT = Path(__file__).parent.parent  # INFINI_ROOT: lib/ has the libraries, include/ their C headers
_PAUSE_SOFT = 1  # omp_pause_soft: settings such as the number of threads stay
# Tests of the CUDA kernels without a GPU load libraries of another folder, build/native/emulated.
CHOSEN = os.environ.get("INFINI_LIBRARIES")
PATH = Path(CHOSEN or ROOT / "lib") / "libtorch_infini.so"


def check_torch(version: str) -> None:
    """Raise ImportError unless this release of torch can run the library."""
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"torch_infini needs torch >= {oldest}, found {version}: run `pip install 'torch>={oldest}'` "
            "(nothing has to be rebuilt)."
        )


def load(path: Path) -> ctypes.CDLL:
    """Load the library into torch; return the runtime it stands on, libinfinirt, the functions used here declared."""
    if not path.is_file():
        if CHOSEN and path == PATH:
            raise ImportError(
                f"torch_infini: INFINI_LIBRARIES must be a folder with {path.name} (`make test-emulated` builds one), "
                f"or not be set, got {CHOSEN}"
            )
        raise ImportError(
            f"torch_infini is not built: {path.name} is missing; run `make build` in a checkout, or `pip install .`."
        )
    try:
        torch.ops.load_library(str(path))
        runtime = ctypes.CDLL(str(path.with_name("libinfinirt.so")))
    except OSError as error:
        raise ImportError(
            f"torch_infini's library cannot be loaded on {platform.machine()} with torch {torch.__version__} "
            f"({error}): rebuild it here with `pip install --force-reinstall --no-deps .`."
        ) from error
    for name in ("infiniGetLastErrorMessage", "infinirtCpuCapability", "infinirtCpuTilesRefused"):
        getattr(runtime, name).restype = ctypes.c_char_p
    if runtime.infinirtCpuCapability() is None:  # INFINI_CPU_CAPABILITY names none
        raise ImportError(runtime.infiniGetLastErrorMessage().decode())
    return runtime


def is_whole(folder: Path = PATH.parent) -> bool:
    """Whether the libraries of a folder are those of a whole build, not of the part that `make demo` runs."""
    return (folder / "libinfinicore_cpp_api.so").is_file()


def require_part(what: str, is_there: bool) -> None:
    """Raise ImportError for a part that `make demo` does not build.

    Args:
        what: The part that the caller needs, as the subject of the sentence.
        is_there: Whether this build has it.
    """
    if not is_there:
        raise ImportError(f"{what} is not in this build, which has what `make demo` runs: `make build` builds the rest")


check_torch(torch.__version__)
RUNTIME = load(PATH)
_TORCH_LIBRARY = ctypes.CDLL(str(PATH))
_sees_autograd = _TORCH_LIBRARY.infiniTorchSeesAutograd
_sees_autograd.restype = ctypes.c_bool
SEES_AUTOGRAD: bool = _sees_autograd()  # whether this torch has what csrc/torch/autograd_torch.cpp asks

if platform.machine() == "aarch64":
    CPU_CAPABILITIES: tuple[str, ...] = ("neon", "neon_dotprod", "neon_bf16", "avx512_amx")  # the last one emulated
else:
    CPU_CAPABILITIES = ("baseline", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "avx512_amx")


def cpu_capability() -> str:
    """The instruction set that the CPU kernels use now; INFINI_CPU_CAPABILITY lowers it at import."""
    return RUNTIME.infinirtCpuCapability().decode()


capability = cpu_capability()  # as it was at import, or as Python set it last: cheaper to ask at every product


def cpu_capabilities() -> list[str]:
    """The instruction sets that this machine and this build have, lowest first."""
    return [name for name in CPU_CAPABILITIES if RUNTIME.infinirtCpuHasCapability(name.encode()) > 0]


def cpu_tiles() -> str:
    """Why this process has no tile registers (AMX), or that they are emulated; empty where it has them."""
    return RUNTIME.infinirtCpuTilesRefused().decode()


def release_threads() -> None:
    """End the OpenMP threads that wait for parallel regions of the calling thread; its next region starts others.

    A program that computes in another thread from now on calls this. OpenMP's threads wait actively only where all of
    them, of every thread that has had a region, are no more than the CPUs: with a second team, each region of a step
    would wake threads that sleep.
    """
    pause = getattr(
        _TORCH_LIBRARY, "omp_pause_resource_all", None
    )  # of OpenMP 5.0, in the runtime that it is linked to
    if pause is not None:
        pause(_PAUSE_SOFT)


def emulates_cuda() -> bool:
    """Whether the loaded libraries run the CUDA kernels on the host (csrc/emulation), for CPU tensors."""
    return hasattr(RUNTIME, "infinirtEmulatesCuda")


def set_cpu_capability(name: str) -> None:
    """Use another instruction set from now on, for tests and measurements; ValueError if the machine lacks it."""
    global capability
    if RUNTIME.infinirtCpuSetCapability(name.encode()):
        raise ValueError(RUNTIME.infiniGetLastErrorMessage().decode())
    capability = name
