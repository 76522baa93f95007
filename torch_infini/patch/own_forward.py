"""The forward that a module's own class defines: its code below decorators, and the name by which it takes the cache.

transformers calls the cache `past_key_values`, from release 5.24 on `cache`. The name is read from the signature of the
class at hand, because code from a checkpoint's folder keeps the older name under any release.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any

from torch import nn

PAST, CACHE = CACHE_NAMES = ("past_key_values", "cache")
OLDER_NAMES = (PAST, "cache_params")  # which decorators of forwards with a `cache` translate


def original_of(module: nn.Module) -> type[nn.Module]:
    """Return a module's class; of a patched module the class that it had."""
    found: type[nn.Module] = getattr(type(module), "infini_original", type(module))
    return found


def forwards_of(module: nn.Module | type[nn.Module]) -> list[Callable[..., Any]]:
    """Return the forward of a module's class; where it takes *args, which it passes on, also that of the base."""
    cls = module if isinstance(module, type) else original_of(module)
    own = [vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base)]
    last = next((i for i, forward in enumerate(own) if not takes_any(forward)), 0)
    return own[: last + 1]


def takes_any(function: Callable[..., Any]) -> bool:
    """Return whether a function takes any positional arguments."""
    return any(one.kind is one.VAR_POSITIONAL for one in inspect.signature(function).parameters.values())


def cache_of(module: nn.Module | type[nn.Module]) -> str:
    """Return the argument by which a module's own forward takes the cache; "" if it has none of the names."""
    return next(filter(None, map(cache_name, forwards_of(module))), "")


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function below its decorators; None for what is no function of Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters, below decorators; of a class's function without self."""
    names = list(inspect.signature(function).parameters)
    return names[1:] if names[:1] == ["self"] else names


def cache_name(function: Callable[..., Any]) -> str:
    """Return the parameter by which a function takes the cache; "" if it has none of the names."""
    found = arguments_of(function)
    return next((name for name in CACHE_NAMES if name in found), "")


def with_older_names(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that takes the cache under its older names too, for one whose decorators are left out."""

    @wraps(forward)
    def translating(*args: Any, **kwargs: Any) -> Any:
        for name in OLDER_NAMES:
            if name in kwargs:
                kwargs[CACHE] = kwargs.pop(name)
        return forward(*args, **kwargs)

    return translating


@cache
def with_parameter(function: FunctionType, name: str, new: str) -> FunctionType:
    """Return a copy of a function in which one parameter has another name, without a cost per call."""
    code = function.__code__
    if name not in code.co_varnames[: code.co_argcount] or new in code.co_varnames:
        raise ValueError(f"{function.__qualname__} cannot call {name} {new}")
    code = code.replace(co_varnames=tuple(new if each == name else each for each in code.co_varnames))
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__, made.__doc__, made.__qualname__ = (
        function.__kwdefaults__,
        function.__doc__,
        function.__qualname__,
    )
    made.__module__ = function.__module__
    made.__annotations__ = {new if each == name else each: kind for each, kind in function.__annotations__.items()}
    return made
