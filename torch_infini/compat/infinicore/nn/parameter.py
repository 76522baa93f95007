"""Parameter: a tensor that a module registers when it is assigned to an attribute."""

from __future__ import annotations

from typing import Any, NoReturn

from .._arguments import described
from ..tensor import Tensor


class Parameter(Tensor):
    """A module's parameter: a tensor over the same memory as `data`. Copying or pickling it directly raises."""

    def __init__(self, data: Tensor) -> None:
        if not isinstance(data, Tensor):
            raise ValueError(f"infinicore.nn.Parameter: data must be an infinicore.Tensor, got {described(data)}")
        super().__init__(data._underlying, _torch_ref=data._torch_ref)

    def __copy__(self) -> NoReturn:
        raise ValueError("infinicore.nn.Parameter: cannot be copied: make a new one of the same tensor")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ValueError("infinicore.nn.Parameter: cannot be deep-copied: copy its data to a new one (copy_())")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError("infinicore.nn.Parameter: cannot be pickled: save the values of a state_dict()")
