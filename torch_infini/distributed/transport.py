"""The transport of a group's CPU tensors: shared memory if all ranks run on one machine, else Gloo.

INFINI_CCL overrides the choice. The ranks exchange their machines through the group's store.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from .libinfiniccl import CPU, unique_id

LOGGER = logging.getLogger("torch_infini.distributed")
CHOICES = ("auto", "shm", "gloo", "nccl")
MOST_RANKS = 64  # ranks that can share memory, at most: csrc/include/infiniccl.h


@dataclass(frozen=True)
class Transport:
    """The transport of a group's CPU tensors ("shm", "gloo", or "none" if INFINI_CCL=nccl) and the reason."""

    name: str
    reason: str


def wanted() -> str:
    value = os.environ.get("INFINI_CCL", "auto")
    if value not in CHOICES:
        raise ValueError(
            "torch_infini.distributed: INFINI_CCL must be auto (shared memory on one machine, Gloo across machines), "
            f"shm, gloo or nccl (CUDA tensors alone), got {value!r}"
        )
    return value


def machine() -> str:
    """Return a string that is equal for processes that can share memory and detect each other's end."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    memory = Path("/dev/shm")
    if not (boot.exists() and memory.is_dir()):
        return f"process {os.getpid()}, whose machine has no /dev/shm"
    return f"{boot.read_text().strip()} {memory.stat().st_dev} {os.readlink('/proc/self/ns/pid')}"


def gather(store: Any, key: str, rank: int, size: int, value: str, timeout: timedelta) -> list[str]:
    store.set(f"{key}/{rank}", value)
    keys = [f"{key}/{other}" for other in range(size)]
    for other, name in enumerate(keys):
        try:
            store.wait([name], timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"torch_infini.distributed: every rank must make the group, got nothing from rank {other} of {size} "
                f"within {timeout.total_seconds():g} s"
            ) from error
    return [store.get(name).decode() for name in keys]


def choose(store: Any, rank: int, size: int, timeout: timedelta) -> Transport:
    """Choose the transport; all ranks choose the same.

    Raises:
        ValueError: If INFINI_CCL is invalid, differs between ranks, or cannot be satisfied.
        RuntimeError: If a rank does not answer within the timeout.
    """
    choice = wanted()
    told = gather(store, "infiniccl/machine", rank, size, f"{choice} {machine()}", timeout)
    choices, machines = zip(*(line.split(" ", 1) for line in told), strict=True)
    for other, theirs in enumerate(choices):
        if theirs != choice:
            raise ValueError(
                f"torch_infini.distributed: INFINI_CCL must be the same on all ranks, got {choice} on rank {rank} and "
                f"{theirs} on rank {other}"
            )
    if choice == "nccl":
        return Transport("none", "INFINI_CCL=nccl")
    if choice == "gloo":
        return Transport("gloo", "INFINI_CCL=gloo")
    far = next((other for other in range(size) if machines[other] != machines[0]), None)
    obstacle = None
    if far is not None:
        obstacle = f"ranks 0 and {far} share no memory"
    elif size > MOST_RANKS:
        obstacle = f"{size} ranks are more than the {MOST_RANKS} that can share memory"
    if obstacle is None:
        return Transport("shm", "all ranks are on one machine" if choice == "auto" else "INFINI_CCL=shm")
    if choice == "shm":
        raise ValueError(
            f"torch_infini.distributed: the ranks must be at most {MOST_RANKS} on one machine where INFINI_CCL=shm, "
            f"got a group of which {obstacle}"
        )
    return Transport("gloo", obstacle)


def shared_unique_id(store: Any, key: str, rank: int, timeout: timedelta, device_type: int = CPU) -> bytes:
    """Make an id of libinfiniccl on rank 0 and share it with all ranks."""
    if rank == 0:
        store.set(key, unique_id(device_type).hex())
    store.wait([key], timeout)
    return bytes.fromhex(store.get(key).decode())
