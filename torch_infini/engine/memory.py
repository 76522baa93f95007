"""cache_bytes_of: the size of a KV cache from the share of a device's memory that a process may use."""

from __future__ import annotations

from pathlib import Path

import torch

from .._core.devices import backing_device

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_USED = (Path("/sys/fs/cgroup/memory.current"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"))


def cache_bytes_of(share: object, device: torch.device | str) -> int:
    """Return how many bytes are left for keys and values.

    The result is share * total - used, of a GPU's memory or the machine's (the container's, if it has a limit).

    Raises:
        ValueError: For a share that is not above 0 and at most 1.
    """
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 < share <= 1:
        raise ValueError(f"torch_infini.LLM: gpu_memory_utilization must be a number above 0, at most 1, got {share!r}")
    found = backing_device(device)
    if found.type == "cuda":
        free, total = torch.cuda.mem_get_info(found)
    else:
        free, total = memory_of_machine()
    return int(share * total) - (total - free)


def memory_of_machine() -> tuple[int, int]:
    """Return (free, total) bytes of memory that this process may use."""
    words = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(words[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for limit, used in zip(_LIMITS, _USED, strict=True):
        if limit.is_file() and (text := limit.read_text().strip()).isdigit() and int(text) < total:
            total = int(text)
            free = min(free, total - int(used.read_text()))
    return max(free, 0), total
