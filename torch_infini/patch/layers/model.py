"""The generating model around patched layers: methods of transformers that patched layers would break."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ..swap import PLAN, Patched
from .interface import NAME
from .quantized import Quantized

IMPLEMENTATION = "_attn_implementation_internal"  # attribute of a config of transformers: the attention's name


if TYPE_CHECKING:

    class Original(Patched, GenerationMixin, PreTrainedModel):
        """A patched class also has the methods of a model of transformers."""

else:
    Original = Patched


class Model(Original):
    """A model with `generate`. Its plan is the name of its original attention implementation."""

    infini_ops = ""  # it calls no op itself

    @classmethod
    def plans(cls, module: Any) -> Sequence[Any]:
        return [vars(module.config).get(IMPLEMENTATION)]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Run continuous batching with the original attention implementation, because it accepts only known names.

        Only attention falls back then, as for any unknown keyword argument.
        """
        served = self.config._attn_implementation == NAME
        if served:
            setattr(self.config, IMPLEMENTATION, vars(self)[PLAN])
        try:
            manager: Any = super().init_continuous_batching(*args, **kwargs)
        except BaseException:
            if served:
                setattr(self.config, IMPLEMENTATION, NAME)
            raise
        if served:
            manager._original_attn_impl = NAME  # which the manager restores when it stops
        return manager

    def get_expanded_tied_weights_keys(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        """Return the original's keys without those of quantized layers, which have no weight to tie."""
        keys = super().get_expanded_tied_weights_keys(*args, **kwargs)

        def layer(name: str) -> nn.Module:
            return self.get_submodule(name.rpartition(".")[0])

        return {name: source for name, source in keys.items() if not isinstance(layer(name), Quantized)}

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save unquantized models only: from_pretrained would take quantized weights for missing ones."""
        if any(isinstance(module, Quantized) for module in self.modules()):
            raise ValueError(
                "torch_infini: save_pretrained: weights must be floating point, got quantized ones: "
                "use torch_infini.save_patched and load_patched"
            )
        return super().save_pretrained(*args, **kwargs)
