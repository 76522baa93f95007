"""Support for infini in accelerate's Accelerator and transformers' Trainer, which choose among devices known by name.

In a process that has enabled infini, torch.accelerator is infini, and both choose it unless they are told to use the
CPU.
"""

from __future__ import annotations

from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from .._core.import_hooks import after_import
from ._enable import NAME, after_enabling


def choose_in_accelerate(state: ModuleType) -> None:
    """Make a single-process PartialState of accelerate use infini as its default device.

    Args:
        state: accelerate.state.
    """
    if isinstance(vars(state.PartialState).get("default_device"), property):  # in other releases nothing is changed
        state.PartialState.default_device = property(lambda self: torch.device(NAME))


def choose_in_transformers(training_args: ModuleType) -> None:
    """Make TrainingArguments.device equal to accelerate's device if that is infini, because both must agree.

    Args:
        training_args: transformers.training_args.
    """
    setup = vars(training_args.TrainingArguments).get("_setup_devices")
    if not isinstance(setup, cached_property):  # in other releases nothing is changed
        return
    theirs = setup.func

    def device(self: Any) -> torch.device:
        found: torch.device = theirs(self)
        chosen = getattr(self.distributed_state, "device", found)
        if chosen.type != NAME:
            return found
        self._n_gpu = 1  # one device, not all GPUs
        return torch.device(NAME)

    ours = cached_property(device)
    ours.__set_name__(training_args.TrainingArguments, "_setup_devices")
    training_args.TrainingArguments._setup_devices = ours


after_enabling.append(lambda: after_import("accelerate.state", choose_in_accelerate))
after_enabling.append(lambda: after_import("transformers.training_args", choose_in_transformers))
