"""The quantizer with which transformers' from_pretrained opens a folder of save_patched with quantized weights.

transformers finds it by the name "torch_infini" in config.json; importing this module registers it. This happens while
transformers itself is imported, so that functions here import the modules that load models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..._core.dtypes import SAFETENSORS_DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METHOD = "torch_infini"
WHERE = "torch_infini: from_pretrained"


@register_quantization_config(METHOD)
class QuantizationConfig(QuantizationConfigMixin):
    """The entry `quantization_config` of a config.json; its arguments are the fields there.

    Args:
        quantized: Format and group of each quantized layer, by its name.
        dtype: The dtype of activations and of all other weights.
        only: As for patch_model.
        skip: As for patch_model.
    """

    quant_method: Any  # transformers declares an enum of its own methods

    def __init__(
        self,
        quantized: dict[str, dict[str, Any]] | None = None,
        dtype: str = "",
        only: list[str] | None = None,
        skip: list[str] | None = None,
        quant_method: str = METHOD,
        **more: Any,
    ) -> None:
        self.quant_method = quant_method  # the others are checked when a model is read
        self.quantized, self.dtype, self.only, self.skip = quantized, dtype, only, [] if skip is None else skip

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        from ...weights import respelled

        make: Callable[..., Any] = super().from_dict  # transformers' own has no annotations
        return make(respelled(config_dict), return_unused_kwargs, **kwargs)


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):
    """Creates the quantized layers, and patches the model once they are loaded."""

    quantization_config: QuantizationConfig
    requires_calibration = True  # it does not quantize while loading: patch_model does that

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Remember the requested dtype: the model is converted once it is loaded."""
        self.wanted = dtype
        return dtype

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> None:
        """Keep the dtype of every tensor in the file."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from ...checkpoints import saved_layers
        from . import folder, load

        files, config = kwargs.get("checkpoint_files") or (), self.quantization_config
        self.folder = Path(files[0]).parent if files else None
        stored = getattr(torch, str(config.dtype), None)
        if not isinstance(stored, torch.dtype) or stored not in SAFETENSORS_DTYPES.values():
            raise folder.invalid(folder.CONFIG, "quantization_config.dtype", "be a dtype", config.dtype, WHERE)
        layers = saved_layers(config.quantized, folder.CONFIG, WHERE)
        for field in ("only", "skip") if config.only is not None else ("skip",):
            folder.checked_patterns(getattr(config, field), folder.CONFIG, field, WHERE)
        self.stored = stored
        load.install_all(model, layers, stored, folder.CONFIG, WHERE)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from . import load

        config = self.quantization_config
        # From here on the model is like one that patch_model quantized: transformers' rules for quantized models (no
        # float(), no half()) do not apply.
        HfQuantizer.remove_quantization_config(self, model)
        for module in model.modules():
            if hasattr(module, "config"):
                vars(module.config).pop("_is_quantized", None)
        load.finish(model, self.folder, config.quantized or {}, config.only, config.skip)
        if self.wanted != self.stored:
            whole: nn.Module = model  # transformers' own `to` has no usable type
            whole.to(self.wanted)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
