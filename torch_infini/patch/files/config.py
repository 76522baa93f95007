"""The two configs by which transformers' from_pretrained knows our quantizer (hugging_face.py).

InfiniConfig says how to quantize a model while it is loaded; QuantizationConfig is what save_patched writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..options import check_weights, patterns

METHOD = "torch_infini"


class InfiniConfig(QuantizationConfigMixin):
    """Quantize and patch a model while transformers loads it.

    `from_pretrained(name, quantization_config=torch_infini.InfiniConfig("int8"))` of any class of transformers is
    `from_pretrained(name)` followed by `torch_infini.patch_model(model, weights="int8")`, whose arguments these are,
    except that a model that cannot be patched is an error. The model's `save_pretrained` writes the integers, and
    from_pretrained reads them again.

    Args:
        weights: A format, "auto:BITS", or "packed" for dense weights, which files hold as they are.
        only: Patterns of the names of the modules to replace.
        skip: Patterns of the names of modules to leave as they are.
        calibrate: For "auto:BITS", [S] token ids.
        strict: Raise if a module would be left as it is.
        verify: Compare the logits before and after.

    Raises:
        TypeError: For patterns that are not a sequence of strings, or a calibrate that is not a tensor.
        ValueError: For unknown weights, or a calibrate that is not token ids.
    """

    quant_method: Any  # transformers declares an enum of its own methods

    def __init__(
        self,
        weights: str = "int8",
        *,
        only: Sequence[str] | None = None,
        skip: Sequence[str] = (),
        calibrate: Tensor | None = None,
        strict: bool = False,
        verify: bool = False,
        quant_method: str = METHOD,
    ) -> None:
        where = "torch_infini.InfiniConfig"
        if weights is None:
            raise ValueError(f"{where}: weights must be the name of a format, or 'auto:BITS', got None")
        check_weights(where, weights, calibrate)
        self.quant_method = quant_method
        self.options: dict[str, Any] = {
            "weights": weights,
            "only": patterns(where, "only", only),
            "skip": patterns(where, "skip", skip) or (),
            "calibrate": calibrate,
            "strict": strict,
            "verify": verify,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as JSON can hold them."""
        ids = self.options["calibrate"]
        options = {**self.options, "calibrate": ids.tolist() if isinstance(ids, Tensor) else None}
        return {"quant_method": self.quant_method, **options}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class QuantizationConfig(QuantizationConfigMixin):
    """The entry `quantization_config` of a config.json; its arguments are the fields there.

    Args:
        quantized: Format and group of each quantized layer, by its name.
        dtype: The dtype of activations and of all other weights.
        only: As for patch_model.
        skip: As for patch_model.
    """

    quant_method: Any

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
        """Return an instance; of InfiniConfig for its arguments as a dict, which from_pretrained takes as well."""
        from ...weights import respelled

        if "weights" not in config_dict:
            make: Callable[..., Any] = super().from_dict  # transformers' own has no annotations
            return make(respelled(config_dict), return_unused_kwargs, **kwargs)
        ids = config_dict.get("calibrate")
        asked = InfiniConfig(**{**config_dict, "calibrate": None if ids is None else torch.tensor(ids)})
        return (asked, kwargs) if return_unused_kwargs else asked
