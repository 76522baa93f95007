"""The models around patched layers: methods of transformers that patched layers would break."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from .files.save import save
from .layers.continuous import continuous_name
from .layers.interface import IMPLEMENTATION, NAME
from .layers.loop import Loop
from .layers.quantized import Quantized, Reformatted
from .swap import PLAN, Patched

if TYPE_CHECKING:

    class Original(Patched, GenerationMixin, PreTrainedModel):
        """A patched class also has the methods of a model of transformers."""

else:
    Original = Patched


class Model(Original):
    """A model of transformers. Its plan is the name of its original attention implementation."""

    infini_ops = ""  # it calls no op itself

    @classmethod
    def plans(cls, module: Any) -> Sequence[Any]:
        return [vars(module.config).get(IMPLEMENTATION)]

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Run continuous batching over infini::attention where that serves it (layers/continuous.py).

        Otherwise with the original attention implementation, because transformers accepts only known names. Attention
        alone falls back then, as for any unknown keyword argument.
        """
        served = self.config._attn_implementation == NAME
        if served:
            setattr(self.config, IMPLEMENTATION, continuous_name(self, vars(self)[PLAN]))
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
        """Return the original's keys without those of layers in another form, which have no weight to tie."""
        keys = super().get_expanded_tied_weights_keys(*args, **kwargs)

        def layer(name: str) -> nn.Module:
            return self.get_submodule(name.rpartition(".")[0])

        return {name: source for name, source in keys.items() if not isinstance(layer(name), Reformatted)}

    def save_pretrained(self, save_directory: str | PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Save the model as transformers does; with quantized weights as save_patched does, in one file.

        Raises:
            ValueError: With quantized weights, for an argument that says what to write or where else.
        """
        if not any(isinstance(module, Quantized) for module in self.modules()):
            return super().save_pretrained(save_directory, *args, **kwargs)
        # In the order of transformers' parameters.
        given = dict(zip(("is_main_process", "state_dict", "push_to_hub", "max_shard_size", "variant"), args)) | kwargs
        refused = [name for name in ("state_dict", "push_to_hub", "variant") if given.get(name)]
        if refused:
            raise ValueError(
                f"torch_infini: save_pretrained: {refused[0]} must not be given for quantized weights, which are "
                f"written whole, into a folder; got {type(given[refused[0]]).__name__}"
            )
        if given.get("is_main_process", True):
            save(self, Path(save_directory))


class DecoderModel(Loop, Model):
    """The decoder of the Llama family, which is a model of transformers by itself."""

    @classmethod
    def plans(cls, module: Any) -> Sequence[Any]:
        return Model.plans(module)
