"""What `from_pretrained` of transformers needs to open a folder of save_patched with integer weights.

transformers finds the quantizer by the name "torch_infini" in config.json; importing this module registers it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "torch_infini"
WHERE = "torch_infini: from_pretrained"


@register_quantization_config(METHOD)
class QuantizationConfig(QuantizationConfigMixin):
    """The entry `quantization_config` of a config.json.

    Args:
        quantised: The format and the group of each layer of integers, by its name.
        dtype: Of activations and of all other weights.
        only: Of patch_model.
        skip: Of patch_model.
    """

    def __init__(
        self,
        quantised: dict[str, dict[str, Any]] | None = None,
        dtype: str = "",
        only: list[str] | None = None,
        skip: list[str] | None = None,
        quant_method: str = METHOD,
        **more: Any,
    ) -> None:
        self.quant_method = quant_method  # the others are checked when a model is read
        self.quantised, self.dtype, self.only, self.skip = quantised, dtype, only, [] if skip is None else skip


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):
    """Makes the layers ready for their integers, and patches the model when these are loaded."""

    requires_calibration = True  # there is no quantizing while loading: patch_model does that

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Remember what was asked for: the model gets it when all is loaded, as by `to`."""
        self.wanted = dtype
        return dtype

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> None:
        """Every tensor is read as it is in the file."""

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        from . import saved

        files, config = kwargs.get("checkpoint_files") or (), self.quantization_config
        self.folder = Path(files[0]).parent if files else None
        self.stored = getattr(torch, str(config.dtype), None)
        if self.stored not in saved.DTYPES.values():
            raise saved.wrong(saved.CONFIG, "quantization_config.dtype", "be a dtype", config.dtype, WHERE)
        layers = saved.checked_layers(config.quantised, saved.CONFIG, WHERE)
        for field in ("only", "skip") if config.only is not None else ("skip",):
            saved.names_in(getattr(config, field), saved.CONFIG, field, WHERE)
        saved.install_all(model, layers, self.stored, saved.CONFIG, WHERE)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        from . import saved

        config = self.quantization_config
        # From here on it is like a model that patch_model quantised, to which transformers' rules for others'
        # quantised models (no float(), no half()) do not apply.
        self.remove_quantization_config(model)
        for module in model.modules():
            if hasattr(module, "config"):
                vars(module.config).pop("_is_quantized", None)
        saved.finish(model, self.folder, config.quantised, config.only, config.skip)
        if self.wanted != self.stored:
            model.to(self.wanted)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
