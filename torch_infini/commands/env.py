"""env: what a bug report needs: versions, the processor, instruction sets, threads, CUDA and our settings."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .._library import PATH, cpu_capabilities, cpu_capability

HELP = "print versions, CPU features and settings, for a bug report"

# Every environment variable that torch_infini reads when it runs.
VARIABLES = {
    "INFINI_CPU_CAPABILITY": "lowers the CPU kernels' instruction set: baseline, avx2, avx512, avx512_bf16",
    "INFINI_LOG": "a line for every call of an op: 1 its name, 2 its arguments too, 3 their statistics too",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def collect() -> dict[str, Any]:
    """All facts, as JSON-able values."""
    cuda = torch.version.cuda
    return {
        "torch_infini": __version__,
        "library": PATH.name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "cpu_capability": cpu_capability(),
        "cpu_capabilities": cpu_capabilities(),
        "threads": torch.get_num_threads(),
        "cuda": cuda,
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "variables": {name: os.environ.get(name) for name in VARIABLES},
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
