"""of_arguments: lets an op's reference, peer and cost take its arguments as one object, written down once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ...ops import REGISTRY

Call = TypeVar("Call")
T = TypeVar("T")


def of_arguments(name: str, made_of: Callable[..., Call], compute: Callable[[Call], T]) -> Callable[..., T]:
    """Return `compute` as a function of the arguments of the op `name`, for OpInfo.

    Args:
        name: The op, whose signature the function gets.
        made_of: Makes the object from the op's arguments, all by name.
        compute: Takes the object.
    """
    spec = REGISTRY[name]
    signature = inspect.signature(spec.function)

    def call(*args: Any, **named: Any) -> T:
        return compute(made_of(**dict(zip(spec.arguments, args, strict=False)), **named))

    parameters = [parameter for parameter in signature.parameters.values() if parameter.name in spec.arguments]
    result = compute.__annotations__["return"]
    call.__signature__ = signature.replace(parameters=parameters, return_annotation=result)  # type: ignore[attr-defined]
    return call
