"""FusedProduct: several layers with one input whose weights are stored together, so that one product computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from ..checks.conditions import unhooked

FUSED = "_infini_fused"  # attribute of the first of the layers: their FusedProduct


class FusedProduct(ABC):
    """The weights of several layers, concatenated by rows.

    Each layer's own buffers are views of its rows. If they no longer are (after loading, conversion, unpickling), the
    next product concatenates them again.

    Attributes:
        shared: The names of these buffers.
        modules: The layers.
        parts: Each layer's buffers by name, as they were concatenated; empty: they have to be.
        whole: The concatenated buffers, by name.
    """

    shared: ClassVar[tuple[str, ...]]

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self.parts: list[list[tuple[str, Tensor | None]]] = []
        self.whole: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"modules": self.modules, "parts": [], "whole": {}}  # the layers' own buffers are pickled with them

    def consists_of(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether these are the layers, without hooks; release the memory if not."""
        same = all(module is own and unhooked(module) for module, own in zip(modules, self.modules, strict=True))
        if not same:
            self.release()  # accelerate's hooks, for example, move the layers' buffers
        return same

    @abstractmethod
    def product(self, x: Tensor) -> Tensor | None:
        """Multiply x by all weights; None if the layers are not stored alike."""

    @abstractmethod
    def concatenate(self) -> bool:
        """Concatenate the layers' buffers; return False if the layers are not stored alike."""

    def release(self) -> None:
        """Drop the references to the concatenated weights; the layers keep their views."""
        self.parts, self.whole = [], {}

    def is_whole(self) -> bool:
        """Return whether every layer's buffers are still views of the concatenated weights."""
        if not self.parts:
            return False
        for own, module in zip(self.parts, self.modules):
            buffers = module._buffers
            for name, part in own:
                if buffers.get(name) is not part:
                    return False
        return True

    def keep_parts(self) -> None:
        """Note the layers' buffers, which are now views of the concatenated ones."""
        self.parts = [[(name, module._buffers.get(name)) for name in self.shared] for module in self.modules]
