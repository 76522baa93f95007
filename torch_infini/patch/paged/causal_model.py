"""find_causal_model, check_model: the causal language model of transformers in what a caller gives the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from ...ops import FLOATS

NAME = "torch_infini.LLM"


def find_causal_model(model: nn.Module) -> Any:
    """Return the causal language model of transformers in a wrapper, or the model itself.

    Raises:
        ValueError: If there is none.
    """
    found = next(
        (m for m in model.modules() if isinstance(m, PreTrainedModel) and isinstance(m, GenerationMixin)), None
    )
    if found is None or found.get_input_embeddings() is None:
        raise ValueError(
            f"{NAME}: model must be a causal language model of transformers, a Decoder or a folder, got a "
            f"{type(model).__name__}"
        )
    return found


def check_model(model: nn.Module) -> tuple[Any, torch.device]:
    """Return the causal language model in a module, and the device that it is on.

    Raises:
        ValueError: If there is none, or it is not loaded, on several devices, or of a dtype without kernels.
    """
    inner = find_causal_model(model)
    away = next((name for name, tensor in model.named_parameters() if tensor.is_meta), None)
    if away is not None:
        raise ValueError(f"{NAME}: the model must be loaded, got {away} on meta")
    # Quantized weights are buffers: a model whose norms have no weights (OLMo) may have no parameters.
    devices = sorted({str(tensor.device) for tensor in model.parameters()})
    devices = devices or sorted({str(tensor.device) for tensor in model.buffers()})
    if len(devices) != 1:
        raise ValueError(f"{NAME}: the model must be on one device, got one on {', '.join(devices) or 'none'}")
    wrong = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype not in FLOATS), None)
    if wrong is not None:
        raise ValueError(f"{NAME}: the model must be float32, bfloat16 or float16, got {wrong}")
    return inner, torch.device(devices[0])
