"""The decoder of a patched model: its own forward, in which each layer hands the norm of its result to the next one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..swap import Patched
from .norm import HANDOVER


class Loop(Patched):
    """A decoder with its original forward, which calls the layers one after another, and then the last norm."""

    infini_ops = ""  # it calls no op itself

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "infini_original" not in vars(cls):
            return
        original = cls.infini_original  # its forward may be replaced later, as Liger-Kernel does

        @functools.wraps(original.forward)  # transformers and Trainer read the signature
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original.forward(self, *args, **kwargs)
            handed = HANDOVER
            outer = handed.result, handed.norm, handed.normed, handed.version
            handed.result = handed.normed = None
            handed.calls += 1
            try:
                return original.forward(self, *args, **kwargs)
            finally:
                handed.calls -= 1
                handed.result, handed.norm, handed.normed, handed.version = outer

        cls.forward = forward

    @classmethod
    def plans(cls, module: Any) -> Sequence[Any]:
        return [None]
