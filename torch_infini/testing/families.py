"""Small models of the Hugging Face families that backend="infini" is held against, and the sites each of them has.

Random weights from configs; two layers, so that what lies between layers is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
        name: As the documentation calls it.
        build: Makes the model, in float32.
        sites: How many sites of each pattern of torch_infini.compile the whole model has.
    """

    name: str
    build: Callable[[], nn.Module]
    sites: dict[str, int]


def family(name: str, *, norms: int, **config: Any) -> Family:
    """A family of transformers' causal language models; `norms`: those of a layer that no addition feeds."""

    def build() -> nn.Module:
        import transformers

        names = {"Phi-3": "Phi3", "Gemma 2": "Gemma2"}
        prefix = names.get(name, name)
        sizes = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, **SIZES}
        torch.manual_seed(0)
        made = getattr(transformers, f"{prefix}Config")(**{**sizes, **config})
        return getattr(transformers, f"{prefix}ForCausalLM")(made).eval()

    fused = name == "Phi-3"
    sites = {
        "add_rms_norm": 2 * LAYERS,
        "attention": LAYERS,
        "linear": (4 if fused else 7) * LAYERS + 1,
        "rms_norm": norms * LAYERS + 1,
        "rope": 2 * LAYERS,
        "swiglu": LAYERS,
    }
    if name == "Gemma 2":  # its MLP is gated by gelu
        sites["geglu"] = sites.pop("swiglu")
    return Family(name, build, sites)


FAMILIES = (
    family("Llama", norms=0),
    family("Mistral", norms=0, sliding_window=None),
    family("Qwen2", norms=0),
    family("Qwen3", norms=2, head_dim=16),
    family("Gemma 2", norms=2, head_dim=16, sliding_window=64),
    family("Phi-3", norms=0, pad_token_id=0),
)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


@dataclass(frozen=True)
class Errors:
    """Root mean square distances between logits: of the compiled model and of eager from float64, and of the two."""

    compiled: float
    eager: float
    between: float


def errors_of(compiled: Tensor, eager: Tensor, exact: Tensor) -> Errors:
    distance = lambda a, b: float((a.double() - b.double()).pow(2).mean().sqrt())
    return Errors(distance(compiled, exact), distance(eager, exact), distance(compiled, eager))
