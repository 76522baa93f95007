"""activate(): registers parts of the plugin in this process's vLLM, once, and records what was replaced and what not.

vLLM may call plugins several times in a process, and calls them in each: front end, engine core and workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from .settings import VARIABLE

TESTED = ("0.32",)  # releases of vLLM; others are tried
# What a release with other interfaces raises while a part is registered.
DIFFERENT = (ImportError, AttributeError, TypeError, ValueError, AssertionError, KeyError)
log = logging.getLogger("vllm.torch_infini")  # below vLLM's own, whose handler and level it has


@dataclass
class Activation:
    """What the plugin did in this process.

    Attributes:
        replaced: Names of vLLM's ops and layers that torch_infini computes, if their arguments allow it.
        left: Names, or parts, that stay vLLM's, and the reason of each.
    """

    replaced: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def leave(self, name: str, reason: str, level: int = logging.INFO) -> None:
        """Record, and log once, that vLLM's own is kept."""
        if self.left.get(name) != reason:
            self.left[name] = reason
            log.log(level, "torch_infini leaves %s to vLLM: %s", name, reason)


_CURRENT = Activation()
_DONE: set[str] = set()


def activate(parts: Sequence[str]) -> Activation:
    """Register parts of the plugin in this process.

    A part that was registered before is not registered again. Where vLLM has no CPU build, or a release lacks what a
    part needs, nothing of that part is registered, and one line of the log says so.

    Args:
        parts: Names of settings.PARTS.

    Returns:
        What was replaced and what was left, in all calls of this process.
    """
    from vllm import __version__, envs
    from vllm.platforms import current_platform

    new = [part for part in parts if part not in _DONE]
    _DONE.update(new)
    if not current_platform.is_cpu():
        for part in new:
            reason = f"vLLM must be its CPU build, got one for {current_platform.device_type}"
            _CURRENT.leave(part, reason, logging.WARNING)
        return _CURRENT
    # vLLM keeps compiled graphs under a hash of its variables: those with other parts must not be loaded.
    envs.environment_variables[VARIABLE] = lambda: ",".join(sorted(_DONE))
    for part in new:
        before = len(_CURRENT.replaced)
        try:
            install: Callable[[Activation], None] = import_module(f".{part}", __package__).install
            install(_CURRENT)
        except DIFFERENT as error:
            tested = ", ".join(TESTED)
            reason = f"vLLM must have the interfaces of {tested}, got {__version__}, where {error}"
            _CURRENT.leave(part, reason, logging.WARNING)
        if names := _CURRENT.replaced[before:]:
            log.info("torch_infini computes %s", ", ".join(names))
    return _CURRENT
