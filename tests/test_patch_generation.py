"""Generation with patched models gives the tokens of the unpatched ones: every decoding, every cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.rounding import greedy_tokens
from support.tiny_llama import PROMPT, CallCounter, close, logits, static_cache, tiny, tokens
from torch_infini.patch import patched

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "beams, static": {"num_beams": 3, "cache_implementation": "static"},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize("kind", GENERATION)
def test_generate(kind: str, padded: bool) -> None:
    model = tiny()
    ids = tokens(1 if kind == "prompt lookup" else 3)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
        if len(ids) > 1:
            mask[1, :1] = 0
        ids = ids.masked_fill(mask == 0, 0)

    def generate() -> Tensor:
        torch.manual_seed(3)
        options = {"attention_mask": mask, "max_new_tokens": 14, **GENERATION[kind]}
        if options.get("do_sample") or "num_beams" in options:
            return model.generate(ids, **{"do_sample": False, **options})
        return greedy_tokens(model, ids, **options)

    expected = generate()
    assert len(set(expected[0, PROMPT:].tolist())) > 4
    with patched(model, strict=True), CallCounter() as counter:
        assert torch.equal(generate(), expected)
        assert counter.counts["attention"] and counter.counts["attention"] * 2 == counter.counts["fused_linear"]


def dynamic_cache(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize("make_cache", [dynamic_cache, static_cache])
def test_continuation(make_cache: Callable[[Any], Any], padded: bool) -> None:
    """Calls of several tokens that continue a cache, as with a cached prefix: 4, then 1, 3 and 1."""
    model, ids = tiny(), tokens()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def run() -> list[Tensor]:
        cache, results, start = make_cache(model), [], 0
        for count in (4, 1, 3, 1):
            end = start + count
            kwargs = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]} if padded else {}
            results.append(logits(model, ids[:, start:end], past_key_values=cache, **kwargs))
            start = end
        return results

    expected = run()
    with patched(model, strict=True):
        for actual, wanted in zip(run(), expected, strict=True):
            close(actual, wanted)
    if not padded:
        close(torch.cat(expected, 1), logits(model, ids))


def test_cache_of_an_unpatched_model() -> None:
    """A cache that the unpatched model has begun is continued by the patched one."""
    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    cache = dynamic_cache(model)
    logits(model, ids[:, :5], past_key_values=cache)
    with patched(model, strict=True):
        close(logits(model, ids[:, 5:], past_key_values=cache), expected[:, 5:])
