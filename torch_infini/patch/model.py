"""The model around patched layers: what transformers does with a whole model and could not do with a patched one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .interface import NAME
from .quantised import QuantisedLinear
from .swap import PLAN, Patched

IMPLEMENTATION = "_attn_implementation_internal"  # where a config of transformers keeps the attention's name


class Model(Patched):
    """A model that generates. Its plan is the attention implementation that it had."""

    infini_ops = ""  # it calls none itself

    @classmethod
    def plans(cls, module: Any) -> Sequence[Any]:
        return [vars(module.config).get(IMPLEMENTATION)]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Continuous batching knows its attention implementations by name: it runs with the model's own.

        Only attention itself steps aside for that, as for everything that it is given more than it knows.
        """
        served = self.config._attn_implementation == NAME
        if served:
            setattr(self.config, IMPLEMENTATION, vars(self)[PLAN])
        try:
            manager = super().init_continuous_batching(*args, **kwargs)
        except BaseException:
            if served:
                setattr(self.config, IMPLEMENTATION, NAME)
            raise
        if served:
            manager._original_attn_impl = NAME  # what it sets when it stops
        return manager

    def get_expanded_tied_weights_keys(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        """The original's, but for layers of integers, which have no weight that could be tied."""
        keys = super().get_expanded_tied_weights_keys(*args, **kwargs)
        layer = lambda name: self.get_submodule(name.rpartition(".")[0])
        return {name: source for name, source in keys.items() if not isinstance(layer(name), QuantisedLinear)}

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """The original's; integers would be taken for missing weights by from_pretrained."""
        if any(isinstance(module, QuantisedLinear) for module in self.modules()):
            raise ValueError(
                "torch_infini: save_pretrained: weights must be floating point, got integers: "
                "use torch_infini.save_patched and load_patched"
            )
        return super().save_pretrained(*args, **kwargs)
