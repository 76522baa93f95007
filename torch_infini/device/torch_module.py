"""The module torch.infini: devices, streams, events, random numbers and memory, with the names of other device modules.

enable() installs it. Memory statistics are those of torch.accelerator.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import OutOfMemoryError, Tensor
from torch.accelerator.memory import (
    empty_cache,
    get_memory_info,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)

from . import inductor
from ._state import backing, vendor_device
from ._streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)

Device = torch.device | str | int | None

__all__ = [
    "DeviceProperties",
    "Event",
    "OutOfMemoryError",
    "Stream",
    "StreamContext",
    "current_device",
    "current_stream",
    "default_generator",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_memory_info",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "is_tf32_supported",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]


# torch.utils.checkpoint saves the random states of devices whose module says it is initialized.
_initialized = True


def _index(device: Device) -> int:
    """Return the index of an infini device, by default the current one; RuntimeError if it does not exist."""
    if device is None:
        return current_device()
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != "infini":
            raise ValueError(f"torch.infini: device must be infini, got {device}")
        if device.index is None:
            return current_device()
        device = device.index
    if not 0 <= device < device_count():
        raise RuntimeError(f"The device index is out of range: {device} of {device_count()} infini devices")
    return device


# ---- devices ----


def is_available() -> bool:
    """Return whether there is a device; always True after enable()."""
    return device_count() > 0


def is_initialized() -> bool:
    """Return whether the device is ready for use; always True after enable()."""
    return True


def init() -> None:
    """Do nothing: enable() has prepared the device."""


def device_count() -> int:
    """Return the number of devices: 1 backed by the CPU, that of the GPUs backed by CUDA."""
    return 1 if backing() == "cpu" else torch.cuda.device_count()


def current_device() -> int:
    """Return the index of the current device."""
    return 0 if backing() == "cpu" else torch.cuda.current_device()


def set_device(device: torch.device | str | int) -> None:
    """Make a device the current one.

    Raises:
        RuntimeError: If the device does not exist.
    """
    torch.accelerator.set_device_index(_index(device))


class device:
    """Make a device the current one in a `with` statement."""

    def __init__(self, device: torch.device | str | int) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        torch.accelerator.set_device_index(self.idx)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self.prev_idx)


class device_of(device):
    """Make a tensor's device the current one in a `with` statement; does nothing for tensors of other devices."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "infini" else current_device())


def _exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        torch.accelerator.set_device_index(index)
    return before


_maybe_exchange_device = _exchange_device


def get_device_name(device: Device = None) -> str:
    """Return "infini (cpu)", or, backed by CUDA, the GPU's name."""
    index = _index(device)
    return (
        f"infini ({vendor_device() or backing()})"
        if backing() == "cpu"
        else f"infini ({torch.cuda.get_device_name(index)})"
    )


def get_device_capability(device: Device = None) -> dict[str, Any]:
    """Return what the device supports, as torch.accelerator.get_device_capability() does."""
    return torch.accelerator.get_device_capability(_index(device))


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of a device backed by the CPU, with torch.cuda's names.

    Attributes:
        name: As get_device_name() returns it.
        total_memory: The host's memory in bytes, used or not.
        multi_processor_count: CPUs that this process may use.
    """

    name: str
    total_memory: int
    multi_processor_count: int


def get_device_properties(device: Device = None) -> Any:
    """Return a device's DeviceProperties, or, backed by CUDA, the result of torch.cuda.get_device_properties()."""
    index = _index(device)
    if backing() == "cuda":
        return torch.cuda.get_device_properties(index)
    return DeviceProperties(get_device_name(index), mem_get_info(index)[1], len(os.sched_getaffinity(0)))


def synchronize(device: Device = None) -> None:
    """Wait until all work on all streams of a device is done."""
    torch.accelerator.synchronize(_index(device))


def _is_in_bad_fork() -> bool:
    return backing() == "cuda" and bool(torch.cuda._is_in_bad_fork())


# ---- types ----


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that torch.amp.autocast("infini") supports."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether bfloat16 is supported."""
    return backing() == "cpu" or torch.cuda.is_bf16_supported(including_emulation)


def is_tf32_supported() -> bool:
    """Return whether tensor cores compute in tf32: never on the CPU."""
    return backing() == "cuda" and torch.cuda.is_tf32_supported()


# ---- random numbers ----


def default_generator(device: Device = None) -> torch.Generator:
    """Return the generator that ops without a generator argument use."""
    return torch.ops.infini_device.default_generator(_index(device))


def manual_seed(seed: int) -> None:
    """Seed the current device's default generator."""
    default_generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the default generators of all devices."""
    for index in range(device_count()):
        default_generator(index).manual_seed(int(seed))


def seed() -> int:
    """Seed the current device's default generator with a number from the system, and return it."""
    return default_generator().seed()


def seed_all() -> None:
    """Seed the default generators of all devices with one number from the system."""
    manual_seed_all(seed())


def initial_seed() -> int:
    """Return the seed of the current device's default generator."""
    return default_generator().initial_seed()


def get_rng_state(device: Device = "infini") -> Tensor:
    """Return the state of a device's default generator, a uint8 tensor on the CPU."""
    return default_generator(device).get_state()


def get_rng_state_all() -> list[Tensor]:
    """Return the states of all devices' default generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(new_state: Tensor, device: Device = "infini") -> None:
    """Set the state of a device's default generator to one of get_rng_state()."""
    default_generator(device).set_state(new_state)


def set_rng_state_all(new_states: list[Tensor]) -> None:
    """Set the states of all devices' default generators."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# ---- memory ----


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the bytes that are free and the bytes in total."""
    return get_memory_info(_index(device))


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """Return memory_stats() as nested dictionaries, by the parts of the names."""
    nested: dict[str, Any] = {}
    for name, value in memory_stats(_index(device)).items():
        *outer, last = name.split(".")
        inside = nested
        for part in outer:
            inside = inside.setdefault(part, {})
        inside[last] = value
    return nested


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Return a table of memory_stats() to print.

    Args:
        device: An infini device; None: the current one.
        abbreviated: Show only the bytes allocated for tensors and the bytes reserved.
    """
    index = _index(device)
    rows = [("allocated_bytes", "Bytes of tensors"), ("reserved_bytes", "Bytes taken")]
    if not abbreviated:
        rows += [("requested_bytes", "Bytes asked for"), ("allocation", "Allocations"), ("segment", "Blocks taken")]
    stats = memory_stats(index)
    lines = [
        f"{get_device_name(index)}, device {index}: {stats['num_ooms']} times out of memory",
        f"{'':20}" + "".join(f"{title:>20}" for title in ("current", "peak", "allocated", "freed")),
    ]
    for key, title in rows:
        values = (stats[f"{key}.all.{kind}"] for kind in ("current", "peak", "allocated", "freed"))
        lines.append(f"{title:20}" + "".join(f"{value:>20,}" for value in values))
    return "\n".join(lines) + "\n"


def __getattr__(name: str) -> Any:
    """Provide Inductor's classes, which torch looks up here when it first compiles: inductor.py."""
    return inductor.codegen(name)
