"""Providers: other implementations of ops, registered and chosen by name; ours compute until one is chosen.

Ops without a chosen provider are unchanged and cost nothing extra. A choice holds for the whole process. It must not
change while another thread calls the op, because torch's dispatcher does not wait for calls.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch

from . import _ntops
from ._provider_kernels import Provider, check_signature, kernels, lay, overloads
from ._registry import REGISTRY

OURS = "infini"
F = TypeVar("F", bound=Callable[..., Any])

_lock = threading.RLock()
_registered: dict[tuple[str, str, str], Provider] = {}  # by op, device and name
# By op and device; destroying a library undoes its choice.
_chosen: dict[tuple[str, str], tuple[Provider, torch.library.Library]] = {}
_setting: dict[tuple[str, str | None], _Entry] = {}  # INFINI_PROVIDERS, by op and device; None: every device


@overload
def register_provider(
    op: str,
    fn: None = None,
    *,
    device: str,
    name: str,
    out: Callable[..., Any] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> Callable[[F], F]: ...


@overload
def register_provider(
    op: str,
    fn: F,
    *,
    device: str,
    name: str,
    out: Callable[..., Any] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> F: ...


def register_provider(
    op: str,
    fn: F | None = None,
    *,
    device: str,
    name: str,
    out: Callable[..., Any] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> F | Callable[[F], F]:
    """Register another implementation of an op for a device type: a Triton kernel, or a vendor's library.

    Registering alone changes nothing: use_provider() or the environment variable INFINI_PROVIDERS chooses it.

    Args:
        op: The op's name, for example "silu".
        fn: Takes all arguments of the op's schema, by position, and returns what the op returns: new contiguous tensors
            of the op's shape and dtype. It runs without autograd, on the device of the call. For an op that writes into
            its arguments it writes them and returns None. If fn is None, a decorator is returned.
        device: The device type: "cpu", "cuda" or any other that torch knows.
        name: The provider's name, the same for all its ops: letters, digits and "_.-". "infini" means our kernels.
        out: For the out form: also takes the tensors to write as keyword arguments (out; for several out0, out1, ...).
            None: results of fn are copied. The in-place form always copies.
        dtypes: The supported dtypes of the first floating-point tensor of a call; calls with others raise. None: all.

    Returns:
        fn, or a decorator that takes it.

    Raises:
        ValueError: For an unknown op or device, a name that is invalid or taken, or `out` for an op without an out
            form.
        TypeError: If fn or out does not take those arguments.
    """
    if fn is None:
        return lambda function: register_provider(op, function, device=device, name=name, out=out, dtypes=dtypes)
    where = "torch_infini.ops.register_provider"
    spec = _spec(where, op)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name == OURS:
        raise ValueError(f"{where}: name must be of letters, digits and '_.-', and not {OURS!r}, got {name!r}")
    if out is not None and not spec.outputs:
        raise ValueError(f"{where}: out must be left out, for {op} writes into its arguments and has no out form")
    if dtypes is not None and not (dtypes and all(isinstance(dtype, torch.dtype) for dtype in dtypes)):
        raise ValueError(f"{where}: dtypes must be one or more of torch's, or None for all, got {dtypes!r}")
    provider = Provider(op, _device_type(where, device), name, fn, out, None if dtypes is None else tuple(dtypes))
    check_signature(provider)
    key = (op, provider.device, name)
    with _lock:
        if key in _registered:
            raise ValueError(
                f"{where}: name must be new for {op} on {provider.device} (unregister_provider takes one away), got "
                f"{name!r}"
            )
        _registered[key] = provider
        entry = _setting.get((op, provider.device)) or _setting.get((op, None))
        if entry is not None and entry.name == name:
            _set(op, provider.device, provider)
            entry.met()
    return fn


def unregister_provider(op: str, name: str, *, device: str | None = None) -> None:
    """Remove a registered provider.

    Args:
        op: The op's name.
        name: The provider's name.
        device: The device type. None: every device that it is registered for.

    Raises:
        ValueError: If the provider is not registered, or is in use.
    """
    where = "torch_infini.ops.unregister_provider"
    with _lock:
        found = _find(where, op, name, device)
        for provider in found:
            if _current(op, provider.device) is provider:
                raise ValueError(f"{where}: name must not be in use, got {name!r} for {op} on {provider.device}")
        for provider in found:
            del _registered[provider.op, provider.device, provider.name]


def use_provider(op: str, name: str, *, device: str | None = None) -> Chosen:
    """Make a provider compute an op from now on, in all threads and forms; in a `with` statement, until its end.

    Code that was compiled, captured in a graph or recorded as a program before keeps the implementation it was made
    with. No other thread may call the op meanwhile.

    Args:
        op: The op's name.
        name: The provider's name; "infini" means our kernels. "ntops" is registered if that package is installed.
        device: The device type. None: every device that it is registered for.

    Returns:
        A context manager whose end restores the previous choice.

    Raises:
        ValueError: If no such provider is registered.

    Example:
        >>> with torch_infini.ops.use_provider("silu", "ntops"):
        >>>     model(ids)
    """
    where = "torch_infini.ops.use_provider"
    with _lock:
        spec = _spec(where, op)
        choice: dict[str, Provider | None]
        if name == OURS:
            devices = [device_ for op_, device_ in _chosen if op_ == spec.name]
            choice = dict.fromkeys(devices if device is None else [_device_type(where, device)])
        else:
            _ntops.register_if_asked(op, name, register_provider, _registered)
            choice = {provider.device: provider for provider in _find(where, op, name, device)}
        before = {device_: _current(op, device_) for device_ in choice}
        for device_, provider in choice.items():
            _set(op, device_, provider)
    return Chosen(op, before)


class Chosen:
    """The result of use_provider: a context manager whose end restores the previous choice."""

    def __init__(self, op: str, before: dict[str, Provider | None]) -> None:
        self._op, self._before = op, before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        with _lock:
            for device, provider in self._before.items():
                _set(self._op, device, provider)


def providers(op: str | None = None) -> list[Provider]:
    """List the registered providers, by op, device and name.

    Args:
        op: Only the providers of this op.

    Raises:
        ValueError: For an unknown op.
    """
    if op is not None:
        _spec("torch_infini.ops.providers", op)
    with _lock:
        return [_registered[key] for key in sorted(_registered) if op in (None, key[0])]


def chosen_providers(device: str | None = None) -> list[Provider]:
    """List the providers that currently compute their ops, by op and device.

    Args:
        device: Only on this device type.
    """
    with _lock:
        return [_chosen[key][0] for key in sorted(_chosen) if device in (None, key[1])]


def _current(op: str, device: str) -> Provider | None:
    found = _chosen.get((op, device))
    return None if found is None else found[0]


def awaited_providers() -> list[str]:
    """List the entries of INFINI_PROVIDERS whose provider is not registered; our kernels compute instead."""
    with _lock:
        return [str(entry) for entry in _setting.values() if entry.awaited]


def choose_providers(setting: str) -> None:
    """Choose providers as INFINI_PROVIDERS does: those registered now, and others as soon as they are registered.

    The first call of an op whose provider is still missing warns. A second call of this function forgets the previous
    setting, but not the choices that it has made.

    Args:
        setting: "silu=ntops,rms_norm@cuda=triton_rms": op=name for every device that the provider is registered for,
            op@device=name for one device.

    Raises:
        ValueError: For any other syntax, an unknown op or device, or two entries for the same op and device.
    """
    where = "INFINI_PROVIDERS"
    entries: dict[tuple[str, str | None], str] = {}
    for part in filter(None, (part.strip() for part in setting.split(","))):
        match = re.fullmatch(r"(\w+)(?:@(\w+))?=([A-Za-z0-9_.-]+)", part)
        if match is None:
            raise ValueError(f"{where} must be op=name or op@device=name, with commas between, got {part!r}")
        op, device, name = match.groups()
        _spec(where, op)
        key = op, None if device is None else _device_type(where, device)
        if key in entries or any(op == other and None in (key[1], device_) for other, device_ in entries):
            raise ValueError(f"{where} must have one entry for an op, or one for each of its devices, got {part!r} too")
        entries[key] = name
    with _lock:
        for entry in _setting.values():
            entry.met()
        _setting.clear()
        for (op, device), name in entries.items():
            entry = _setting[op, device] = _Entry(op, device, name)
            try:
                use_provider(op, name, device=device)
            except _NotRegistered:
                entry.await_it()


class _NotRegistered(ValueError):
    pass


class _Entry:
    """An entry of INFINI_PROVIDERS. While its provider is missing, its kernels warn at the op's first call."""

    def __init__(self, op: str, device: str | None, name: str) -> None:
        self.op, self.device, self.name = op, device, name
        self._warned = False
        self._library: torch.library.Library | None = None

    @property
    def awaited(self) -> bool:
        return self._library is not None

    def await_it(self) -> None:
        self._library = torch.library.Library("infini", "IMPL")
        for device in REGISTRY[self.op].backends if self.device is None else [self.device]:
            key = torch._C._dispatch_key_for_device(device)
            for op in overloads(REGISTRY[self.op]):
                if torch._C._dispatch_has_kernel_for_dispatch_key(op._name, key):
                    lay(op, self._warning(torch.library.get_kernel(op, key)), key, self._library)

    def met(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _warning(self, onward: Any) -> Callable[..., Any]:
        def warn_and_call(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"torch_infini: INFINI_PROVIDERS has {self}, but no such provider is registered "
                    f"({_there_are(self.op)}): torch_infini's own kernel computes {self.op}",
                    stacklevel=2,
                )
            return onward.call_boxed(keys, *args, **kwargs)

        return warn_and_call

    def __str__(self) -> str:
        return f"{self.op}{'' if self.device is None else '@' + self.device}={self.name}"


def _set(op: str, device: str, provider: Provider | None) -> None:
    """Make a provider, or our kernels, compute an op on a device."""
    if _current(op, device) is provider:
        return
    before = _chosen.pop((op, device), None)
    if provider is not None:
        library = torch.library.Library("infini", "IMPL")
        for op_, kernel in kernels(provider):
            lay(op_, kernel, torch._C._dispatch_key_for_device(device), library)
        _chosen[op, device] = provider, library
    if before is not None:
        before[1]._destroy()  # last, so that ours never computes between two providers


def _find(where: str, op: str, name: str, device: str | None) -> list[Provider]:
    """Return the registered providers of an op with this name; raise ValueError if there is none."""
    type_ = None if device is None else _device_type(where, device)
    found = [p for p in providers(_spec(where, op).name) if p.name == name and type_ in (None, p.device)]
    if not found:
        on = "" if device is None else f" on {type_}"
        raise _NotRegistered(
            f"{where}: name must be {OURS!r} or a provider that is registered for {op}{on}, got {name!r} "
            f"({_there_are(op)}{_ntops.missing(name)})"
        )
    return found


def _there_are(op: str) -> str:
    names = [f"{p.name!r} on {p.device}" for p in providers(op)]
    return f"there {'are' if len(names) > 1 else 'is'} {', '.join(names) or 'none'}"


def _spec(where: str, op: str) -> Any:
    if op not in REGISTRY:
        raise ValueError(f"{where}: op must be one that `python -m torch_infini ops` lists, got {op!r}")
    return REGISTRY[op]


def _device_type(where: str, device: str) -> str:
    try:
        found = torch.device(device)
        torch._C._dispatch_key_for_device(found.type)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{where}: device must be a type of device that torch knows, got {device!r}") from error
    if found.index is not None:
        raise ValueError(f"{where}: device must be a type of device, without a number, got {device!r}")
    return found.type
