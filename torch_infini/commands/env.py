"""env: the facts that a bug report needs: versions, processor, instruction sets, threads, CUDA and our settings."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import platform
from typing import Any

import torch

from .. import __version__, ops
from .._core import attention, products
from .._core.cpu import cpu_name
from .._core.left_out import HAS_COMPAT
from .._core.library import (
    CPU_CAPABILITIES,
    PATH,
    RUNTIME,
    cpu_capabilities,
    cpu_capability,
    cpu_tiles,
    emulates_cuda,
    is_whole,
)

HELP = "print versions, CPU features and settings, for a bug report"

NVIDIA, DEVICE_TYPE_NOT_SUPPORTED = 1, 5  # of csrc/include/infinicore.h

# Every environment variable that torch_infini reads when it runs.
VARIABLES = {
    "INFINI_API_KEY": "the key that clients of serve must send; env does not show it",
    "INFINI_CACHE": "a folder in which models on the CPU are kept as they are when ready, and mapped at the next start",
    "INFINI_CPU_CAPABILITY": f"lowers the CPU kernels' instruction set: {', '.join(CPU_CAPABILITIES)}",
    "INFINI_CPU_STREAMS": "queued: CPU streams queue their work for a thread each; immediate: it is done on return",
    "INFINI_CUDA_PDL": "0: kernels on CUDA are launched one after another, with no programmatic dependent launch",
    "INFINI_EXACT_ATTENTION": "1: prefill on CUDA in half types rounds its result alone, by our kernels",
    "INFINI_WEIGHT_READING": "one: products with few rows read weights in one place; several: in four at once",
    "INFINI_EMULATE": "amx: the level avx512_amx in plain C++, on any machine, for tests",
    "INFINI_LOG": "a line for every call of an op: 1 its name, 2 its arguments too, 3 their statistics too",
    "INFINI_PRODUCTS": "a file that tune wrote; default: the built-in table; ours: never ATen",
    "INFINI_PROVIDERS": "what computes ops instead of our kernels: op=name or op@device=name, with commas between",
    "INFINI_SLICE_BYTES": "bytes of unpacked quantized weight that CUDA holds at a time",
    "TORCH_INFINI_DEVICE": "cpu, cuda or a vendor's library: import torch enables the device infini on it",
    "TORCH_INFINI_VLLM": "1, or parts with commas between: vLLM's CPU build computes with our kernels",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_driver() -> str | None:
    """Return the CUDA release that the driver supports; None if there is no driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def build() -> str:
    """Describe which parts were built."""
    if is_whole():
        return "whole" if HAS_COMPAT else "without compat, for scripts of infinicore and infinilm (INFINI_COMPAT=0)"
    levels = ", ".join(cpu_capabilities())
    absent = "C interface, infinicore, runtime.record, device infini"
    return f"what `make demo` runs: kernels of {levels}; not built: {absent} (`make build` builds all)"


def cuda_build() -> str:
    """Describe whether our libraries have CUDA kernels."""
    # Device -1 always fails; the status says whether the device type is built.
    absent = RUNTIME.infinirtSetDevice(NVIDIA, -1) == DEVICE_TYPE_NOT_SUPPORTED
    return "no" if absent else "emulated on the CPU" if emulates_cuda() else "yes"


def cuda_kernels() -> str:
    """Describe whether torch calls them for CUDA tensors: both the build and this torch must have CUDA."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("infini::rms_norm", "CUDA"):
        return "registered"
    return f"not registered: {'this torch has no CUDA' if torch.version.cuda is None else 'the build has none'}"


def cuda_devices() -> list[str]:
    """List name, compute capability and memory of each GPU, as torch sees them."""
    names = []
    for index in range(torch.cuda.device_count() if torch.version.cuda else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        names.append(f"{properties.name} ({capability}, {properties.total_memory / 2**30:.1f} GiB)")
    return names


def shown(variable: str) -> str | None:
    """Return a variable's value; for a secret only that it is set."""
    value = os.environ.get(variable)
    return "set" if value is not None and variable == "INFINI_API_KEY" else value


def collect() -> dict[str, Any]:
    return {
        "torch_infini": __version__,
        "library": PATH.name,
        "build": build(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "cpu_capability": cpu_capability(),
        "cpu_capabilities": cpu_capabilities(),
        "cpu_tiles": cpu_tiles() or "AMX",
        "products": {
            **{str(dtype).removeprefix("torch."): f"by {products.described(dtype)}" for dtype in products.DTYPES},
            "table": str(products.SOURCE),
        },
        "threads": torch.get_num_threads(),
        "cuda_build": cuda_build(),
        "cuda_kernels": cuda_kernels(),
        "cuda_runtime": torch.version.cuda,
        "cuda_driver": cuda_driver(),
        "cuda_devices": cuda_devices(),
        "cuda_attention": attention.described(),
        "providers": [f"{p.op} on {p.device} by {p.name}" for p in ops.chosen_providers()],
        "providers_missing": ops.awaited_providers(),
        "variables": {name: shown(name) for name in VARIABLES},
    }


def run(arguments: argparse.Namespace) -> int:
    facts = collect()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}={'not set' if v is None else v}" for key, v in value.items())
        elif isinstance(value, list):
            value = ", ".join(value) or "none"
        print(f"{name:18} {'none' if value is None else value}")
    return 0
