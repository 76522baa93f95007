"""Providers of ops for the tests: one that counts its calls, and the end of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from torch_infini import ops
from torch_infini.ops import unregister_provider, use_provider
from torch_infini.testing.ops import OpInfo

infini = torch.ops.infini


def drop_providers() -> None:
    """Choose none and unregister all."""
    ops.choose_providers("")
    for provider in ops.chosen_providers():
        use_provider(provider.op, "infini")
    for provider in ops.providers():
        unregister_provider(provider.op, provider.name, device=provider.device)


def pass_on(spec: OpInfo) -> Callable[..., Any]:
    """A provider that calls our kernel."""
    onward = torch.library.get_kernel(spec.op, "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    names = ", ".join(spec.arguments)
    scope: dict[str, Any] = {"onward": onward, "keys": keys}
    exec(f"def provided({names}): return onward.call_boxed(keys, {names})", scope)
    return cast(Callable[..., Any], scope["provided"])


def kernels(op: str, key: str = "CPU") -> list[str]:
    """What the dispatcher has for the op's functional form, the newest first."""
    return [line for line in torch._C._dispatch_dump(f"infini::{op}").splitlines() if line.startswith(key)]


class Counted:
    """silu, one off, so that its results are told from ours; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.nn.functional.silu(x).contiguous() + 1
