"""Small models of the families that patch_model supports, the modules it replaces, and the errors of their logits.

Random weights from configs, large enough that tokens depend on all of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .families import SIZES, VOCABULARY
from .new_model import draw_weights, new_model

LAYERS = 2
PROMPTS, LENGTH = 16, 24


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: The prefix of its class names in transformers.
        norms: Norms per layer, outside attention.
        qk_norms: Whether attention normalizes q and k.
        experts: Whether the MLP is a mixture of experts, of which the experts are replaced and the router is not.
        config: The config's entries besides SIZES; lists have an entry per layer and are repeated up to LAYERS.
    """

    name: str
    norms: int = 2
    qk_norms: bool = False
    experts: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    def build(self, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
        """Make the model, in evaluation mode, with the same weights at every call."""
        sizes = {**SIZES, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "pad_token_id": 0}
        ends = {"bos_token_id": 1, "eos_token_id": None}
        values = {**sizes, **ends, **self.config, **changes}
        layers = values["num_hidden_layers"]
        values |= {key: (value * layers)[:layers] for key, value in values.items() if isinstance(value, list)}
        model: nn.Module = new_model(self.name, values)
        draw_weights(model)
        return model.to(dtype)

    @property
    def sites(self) -> dict[str, int]:
        """Return how many modules of each kind patch_model replaces."""
        return {
            "norms": LAYERS * (self.norms + 2 * self.qk_norms) + 1,
            "attention": LAYERS,
            "mlp": LAYERS,
            "layers": LAYERS,
            "rotary": 1,
            "head": 1,
        }


HEAD = {"head_dim": 16}
WINDOW = {"sliding_window": 16}
SANDWICH: dict[str, Any] = {"norms": 4}

FAMILIES = (
    Family("Llama"),
    Family("Mistral", config=WINDOW),
    Family("Ministral", config={**HEAD, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    Family("Qwen2"),
    Family("Qwen3", qk_norms=True, config=HEAD),
    Family("SmolLM3", config={"no_rope_layers": [1, 0]}),
    Family("Phi3", config={"partial_rotary_factor": 0.5}),
    Family(
        "Granite",
        config={
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
        },
    ),
    Family("Exaone4", qk_norms=True, config={**WINDOW, "sliding_window_pattern": 2}),
    Family("SeedOss", config=HEAD),
    Family("HunYuanDenseV1", qk_norms=True, config=HEAD),
    Family("Glm", config=HEAD),
    Family("Glm4", **SANDWICH, config=HEAD),
    Family("Ernie4_5", config=HEAD),
    Family("Helium", config=HEAD),
    Family("Olmo2", qk_norms=True),
    Family("Olmo3", qk_norms=True, config=WINDOW),
    Family("Gemma", config=HEAD),
    Family("Gemma2", **SANDWICH, config={**HEAD, **WINDOW, "attn_implementation": "eager"}),
    Family("Gemma3", **SANDWICH, qk_norms=True, config={**HEAD, **WINDOW}),
    # Every token goes to all experts: a token that rounding sends to others would differ by more than all roundings.
    Family("Mixtral", experts=True, config={"num_local_experts": 4, "num_experts_per_tok": 4}),
    Family(
        "Qwen3Moe",
        qk_norms=True,
        experts=True,
        config={**HEAD, "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 32},
    ),
)


def prompts() -> Tensor:
    """Return [PROMPTS, LENGTH] token ids."""
    return torch.randint(2, VOCABULARY, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(3))


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@dataclass(frozen=True)
class Errors:
    """Absolute errors of the logits of PROMPTS prompts, relative to the model in float64."""

    mean: float
    percentile: float  # the 99th

    @classmethod
    def of(cls, actual: Tensor, exact: Tensor) -> Errors:
        error = (actual.double() - exact).abs().flatten()
        return cls(float(error.mean()), float(error.kthvalue(round(0.99 * error.numel())).values))


def exact_logits(family: Family, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """Return the float64 logits of the model whose weights are rounded to the dtype."""
    model: Any = family.build(dtype).double()
    if family.experts:
        model.set_experts_implementation("eager")  # the only implementation for float64
    return logits(model, ids)
