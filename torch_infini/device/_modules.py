"""Modules that move to infini or back keep their parameters, as between torch's own devices.

For any other device torch makes new parameters: an optimizer would keep the old ones, and tied weights would separate.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn import Module

from ._enable import NAME, after_enabling


def install() -> None:
    """Make Module.to(), .cpu() and .infini() swap parameters that move to or from infini."""
    of_torch = Module.to

    @wraps(of_torch)
    def to(self: Module, *args: Any, **kwargs: Any) -> Module:
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        return _moved(self, device, lambda: of_torch(self, *args, **kwargs))

    Module.to = to  # type: ignore[assignment]
    for name, device in (("cpu", torch.device("cpu")), (NAME, torch.device(NAME))):
        setattr(Module, name, _method(getattr(Module, name), device))


def _method(of_torch: Callable[..., Module], device: torch.device) -> Callable[..., Module]:
    @wraps(of_torch)
    def move(self: Module, *args: Any, **kwargs: Any) -> Module:
        return _moved(self, device, lambda: of_torch(self, *args, **kwargs))

    return move


def _moved(module: Module, device: torch.device | None, move: Callable[[], Module]) -> Module:
    if device is None or all((p.device.type == NAME) == (device.type == NAME) for p in module.parameters()):
        return move()
    future = torch.__future__
    before = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)
    try:
        return move()
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        cause = error.__cause__ or error
    finally:
        future.set_swap_module_params_on_conversion(before)
    warnings.warn(
        f"infini: {type(module).__name__}.to gives the module new parameters, as one of them cannot be swapped "
        f"({cause}): make optimizers anew, and tie weights again",
        stacklevel=3,
    )
    return move()


after_enabling.append(install)
