"""A tiny random LLaMA, tokens for it, and a count of the infini ops that it calls: what tests of patch_model share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_infini.testing.new_model import new_model

from .rounding import assert_clear, assert_same_but_rounding, sums_of

LAYERS = 2
VOCABULARY = 128
PROMPT = 9


def values(**changes: Any) -> dict[str, Any]:
    """What its config is made of."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # large enough that tokens depend on all of the model
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        **changes,
    }


def config(**changes: Any) -> Any:
    """A LlamaConfig."""
    import transformers

    return transformers.LlamaConfig(**values(**changes))


def tiny(dtype: torch.dtype = torch.float32, seed: int = 1, cls: str = "LlamaForCausalLM", **changes: Any) -> Any:
    """The model, in evaluation mode; the same weights for the same seed."""
    model = new_model("Llama", values(**changes), seed, cls.removeprefix("Llama"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms' weights are ones, biases zeros: neither would show a mistake
                parameter.copy_(torch.rand_like(parameter) + (0.5 if "norm" in name else 0))
    return model.to(dtype)


def tokens(batch: int = 2, length: int = PROMPT) -> Tensor:
    """[batch, length] token ids, none of them for padding."""
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(2))


def logits(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(*args, **kwargs).logits


def close(actual: Tensor, expected: Tensor, passes: int = 1, what: str = "result") -> None:
    """Within what another order of sums makes in so many passes through the model, one behind the other.

    Gradients are of two passes: forward and backward.
    """
    terms, depth = sums_of(config())
    assert_same_but_rounding(actual, expected, terms, passes * depth, what)


class CallCounter(TorchDispatchMode):
    """Counts the infini ops that the body calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "infini":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


# What one call with a growing cache makes, and one without a cache.
ALL_CALLS = {
    "fused_linear": 2 * LAYERS,
    "linear": 2 * LAYERS + 1,
    "qkv_rope_cache": LAYERS,
    "attention": LAYERS,
    "swiglu": LAYERS,
    "rms_norm": 1,
    "add_rms_norm": 2 * LAYERS,
}
UNCACHED_CALLS = {**{name: count for name, count in ALL_CALLS.items() if name != "qkv_rope_cache"}, "rope_": LAYERS}


def calls(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, int]:
    """The infini ops of one call of the model, without gradients."""
    with CallCounter() as counter, torch.no_grad():
        model(*args, **kwargs)
    return dict(counter.counts)


def identity(model: nn.Module) -> dict[str, tuple[type, dict[str, Any]]]:
    """All that a patch may touch: each module's class and attributes."""
    return {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}


def config_values(model: Any) -> dict[str, Any]:
    """What a patch may set in the config."""
    return dict(vars(model.config))


def greedy(model: Any, ids: Tensor | None = None, **kwargs: Any) -> Any:
    """What generate returns, 12 new tokens unless told. Without sampling they must be the same on every CPU."""
    values = {"max_new_tokens": 12, "do_sample": False, "input_ids": tokens() if ids is None else ids, **kwargs}
    if values["do_sample"]:
        return model.generate(**values)
    made = model.generate(**{**values, "return_dict_in_generate": True, "output_scores": True})
    assert_clear(made.scores, *sums_of(config()))
    return made if values.get("return_dict_in_generate") else made.sequences


def in_order(module: nn.Module) -> bool:
    """Whether nothing of a patch is left in it."""
    from torch_infini.patch.swap import Patched

    return not any(
        isinstance(m, Patched) or any(name.startswith("_infini_") for name in vars(m)) for m in module.modules()
    )


def static_cache(model: Any) -> Any:
    """A StaticCache of 24 tokens."""
    import transformers

    return transformers.StaticCache(config=model.config, max_cache_len=24)
