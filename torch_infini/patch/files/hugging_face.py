"""The quantizer of transformers' from_pretrained: it quantizes by an InfiniConfig, or opens a folder of save_patched.

transformers finds it by the name "torch_infini" in config.json; importing this module registers it. This happens while
transformers itself is imported, so that functions here import the modules that load models.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from ..._core.dtypes import SAFETENSORS_DTYPES
from ..layers.quantized import Reformatted
from ..options import PACKED
from .config import METHOD, InfiniConfig, QuantizationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WHERE = "torch_infini: from_pretrained"


register_quantization_config(METHOD)(QuantizationConfig)


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):
    """Patches the model once it is loaded; quantized layers of a file are created before, others quantized after."""

    quantization_config: InfiniConfig | QuantizationConfig

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Remember the requested dtype: the model is converted once it is loaded."""
        self.wanted = dtype
        return dtype

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Keep the dtype of every tensor in a file with quantized layers."""
        asked = isinstance(self.quantization_config, InfiniConfig)
        return super().get_new_dtype(converter, param, dtype) if asked else None

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from ...checkpoints import saved_layers
        from . import folder, load

        config = self.quantization_config
        if isinstance(config, InfiniConfig):
            return
        files = kwargs.get("checkpoint_files") or ()
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
        from .. import patch_model
        from . import load

        config = self.quantization_config
        # From here on the model is like one that patch_model quantized: transformers' rules for quantized models (no
        # float(), no half()) do not apply.
        HfQuantizer.remove_quantization_config(self, model)
        for module in model.modules():
            if hasattr(module, "config"):
                vars(module.config).pop("_is_quantized", None)
        if isinstance(config, InfiniConfig):
            report = patch_model(model.eval(), **config.options)
            reason = report.reason
            if not reason and not any(isinstance(module, Reformatted) for module in model.modules()):
                kept = (row.reason for row in report.replaced if row.reason)
                reason = next(kept, "it has no torch.nn.Linear in its layers")
            if reason:
                what = "packed" if config.options["weights"] == PACKED else "quantized"
                raise ValueError(f"{WHERE}: {type(model).__name__} cannot be {what}: {reason}")
            return
        load.finish(model, self.folder, config.quantized or {}, config.only, config.skip)
        if self.wanted != self.stored:
            whole: nn.Module = model  # transformers' own `to` has no usable type
            whole.to(self.wanted)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False
