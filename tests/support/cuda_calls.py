"""Calls on CUDA or its emulation, for tests: results against the reference, what is allocated, captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_infini.testing import check_against_reference, cuda_device
from torch_infini.testing.ops import OP_INFOS, Sample

from .emulated_graphs import captured_by_emulation

DEVICE = cuda_device()


def here(*values: Any) -> list[Any]:
    """On the device, with the strides they have."""
    return [moved(value) if isinstance(value, Tensor) else value for value in values]


def moved(t: Tensor) -> Tensor:
    assert DEVICE is not None  # or the test is skipped
    storage = t.untyped_storage().clone().to(device=torch.device(DEVICE))
    return torch.empty(0, dtype=t.dtype, device=DEVICE).set_(storage, t.storage_offset(), t.shape, t.stride())


def check(name: str, *args: Any, **kwargs: Any) -> Tensor:
    """The op on CUDA against its reference, the arguments on the CPU; its result, there too."""
    spec = OP_INFOS[name]
    actual = spec.op(*here(*args), **kwargs).cpu()
    check_against_reference(spec, Sample("call", args, kwargs), actual.dtype, actual, on_cuda=True)
    return actual


def sizes_of(events: Any) -> list[int]:
    """The bytes of each allocation among a profile's events, and of those within them."""
    mine = [event.extra_fields.alloc_size for event in events if event.typed[0].name == "Allocation"]
    return mine + [size for event in events for size in sizes_of(event.children)]


def allocations(call: Callable[[], Any]) -> list[int]:
    """The bytes of each tensor that the call makes; negative where it is freed."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    return sizes_of(profile.profiler.kineto_results.experimental_event_tree())


def captured_by_torch(call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # warms up
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return result, graph.replay


def captured(call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """(what the call returned while it was captured, a replay of it)."""
    return captured_by_torch(call) if DEVICE == "cuda" else captured_by_emulation(call)
