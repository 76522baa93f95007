"""The backend "infiniccl" of torch.distributed, groups for collective ops, and the tensor-parallel group of a model.

`import torch_infini` suffices for torch.distributed.init_process_group("infiniccl"); docs/distributed.md documents
choices and guarantees. The backend is imported when the first group is made.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.devices import INFINI
from .followers import Followers, follow
from .groups import communicator
from .tensor_parallel import TPGroup, init_tp_group
from .worker_process import prepare_workers
from .workers import Workers

__all__ = ["Followers", "TPGroup", "Workers", "communicator", "follow", "init_tp_group", "prepare_workers"]


def _make_group(options: Any, backend_options: Any) -> Any:
    from .backend import InfiniProcessGroup

    if backend_options is not None:
        raise TypeError(f"infiniccl: pg_options must be None, got {type(backend_options).__name__}")
    return InfiniProcessGroup(options)


if torch.distributed.is_available():
    devices = ["cpu", "cuda", INFINI]
    torch.distributed.Backend.register_backend("infiniccl", _make_group, extended_api=True, devices=devices)
