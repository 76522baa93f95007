"""New models of transformers, with weights drawn so that tokens depend on all of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def new_model(classes: str, config: dict[str, Any], seed: int | None = None, head: str = "ForCausalLM") -> Any:
    """Make a model of transformers in evaluation mode, with the weights that transformers itself draws.

    Args:
        classes: The prefix of its class names: "Llama" for LlamaConfig and LlamaForCausalLM.
        config: The arguments of its config.
        seed: The seed of torch's generator, set before the weights are drawn; None: do not seed.
        head: The suffix of the model's class name.
    """
    import transformers

    if seed is not None:
        torch.manual_seed(seed)
    config_class = "Gemma3Text" if classes == "Gemma3" else classes
    made = getattr(transformers, f"{config_class}Config")(**config)
    return getattr(transformers, f"{classes}{head}")(made).eval()


def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Draw weights such that tokens depend on all of the model; the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # norms and biases: around their initial values
                parameter.add_(noise / 5)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
