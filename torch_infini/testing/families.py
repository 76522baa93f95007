"""Small models of Hugging Face families to test backend="infini" with, and the number of sites in each.

Random weights from configs; two layers, so that patterns between layers occur.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .new_model import new_model

LAYERS = 2
VOCABULARY = 128
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: The name in the documentation.
        classes: The prefix of its class names in transformers.
        norms: Norms per layer that no addition precedes.
        config: The config's entries besides SIZES.
    """

    name: str
    classes: str
    norms: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """Make the model in float32, with the same weights at every call."""
        sizes = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, **SIZES}
        model: nn.Module = new_model(self.classes, {**sizes, **self.config}, seed=0)
        return model

    @property
    def sites(self) -> dict[str, int]:
        """Return the number of sites of each pattern of torch_infini.compile in the whole model."""
        fused = self.classes == "Phi3"
        return {
            "add_rms_norm": 2 * LAYERS,
            "attention": LAYERS,
            "linear": (4 if fused else 7) * LAYERS + 1,
            "rms_norm": self.norms * LAYERS + 1,
            "rope": 2 * LAYERS,
            "geglu" if self.classes == "Gemma2" else "swiglu": LAYERS,
        }


FAMILIES = (
    Family("Llama", "Llama"),
    Family("Mistral", "Mistral", config={"sliding_window": None}),
    Family("Qwen2", "Qwen2"),
    Family("Qwen3", "Qwen3", norms=2, config={"head_dim": 16}),
    Family("Gemma 2", "Gemma2", norms=2, config={"head_dim": 16, "sliding_window": 64}),
    Family("Phi-3", "Phi3", config={"pad_token_id": 0}),
)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


@dataclass(frozen=True)
class Errors:
    """Root mean square distances of logits: compiled from float64, eager from float64, and compiled from eager."""

    compiled: float
    eager: float
    between: float


def errors_of(compiled: Tensor, eager: Tensor, exact: Tensor) -> Errors:
    def distance(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b.double()).pow(2).mean().sqrt())

    return Errors(distance(compiled, exact), distance(eager, exact), distance(compiled, eager))
