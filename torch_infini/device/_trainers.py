"""infini in accelerate's Accelerator and transformers' Trainer, which choose among the devices that they know by name.

A process that enables infini has it as its torch.accelerator; both choose it then, unless they are told cpu.
"""

from __future__ import annotations

from functools import cached_property
from types import ModuleType
from typing import Any

import torch

from .._core.import_hooks import after_import
from ._enable import NAME, after_enabling


def choose_in_accelerate(state: ModuleType) -> None:
    """Let PartialState, of one process, take infini where it would look for a device.

    Args:
        state: accelerate.state.
    """
    if isinstance(vars(state.PartialState).get("default_device"), property):  # else another release: left as it is
        state.PartialState.default_device = property(lambda self: torch.device(NAME))


def choose_in_transformers(training_args: ModuleType) -> None:
    """Let TrainingArguments.device be accelerate's where that is infini, since both have to be the same.

    Args:
        training_args: transformers.training_args.
    """
    setup = vars(training_args.TrainingArguments).get("_setup_devices")
    if not isinstance(setup, cached_property):  # another release: left as it is
        return
    theirs = setup.func

    def device(self: Any) -> torch.device:
        found: torch.device = theirs(self)
        chosen = getattr(self.distributed_state, "device", found)
        if chosen.type != NAME:
            return found
        self._n_gpu = 1  # not all that CUDA has
        return torch.device(NAME)

    ours = cached_property(device)
    ours.__set_name__(training_args.TrainingArguments, "_setup_devices")
    training_args.TrainingArguments._setup_devices = ours


after_enabling.append(lambda: after_import("accelerate.state", choose_in_accelerate))
after_enabling.append(lambda: after_import("transformers.training_args", choose_in_transformers))
