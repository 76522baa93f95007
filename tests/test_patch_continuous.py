"""transformers' generate_batch on patched models: tokens of its own best attention, for five families."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_infini.patch import patch_model, patched
from torch_infini.testing.checkpoints import random_model

transformers: Any = pytest.importorskip("transformers")
from torch_infini.patch.layers import continuous  # noqa: E402  # it imports transformers
from torch_infini.patch.layers.continuous import window_mask  # noqa: E402
from torch_infini.testing.causal_types import build  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "no_graphs_left")
PROMPTS = [[3, 4, 5, 6], [7, 8, 9] * 20, [3, 4, 5, 6, 7, 8], list(range(10, 90)), [3, 4, 5, 6] * 6]
NEW = 10


def gemma3() -> Any:
    """Windows in every second layer, shorter than the prompts."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320, "head_dim": 16}
    config = transformers.Gemma3TextConfig(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=256,
    )
    return transformers.Gemma3ForCausalLM(config).eval()


def gemma2() -> Any:
    """A cap of the scores, which sdpa lacks, and windows."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320, "head_dim": 16}
    config = transformers.Gemma2Config(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        attn_logit_softcapping=2.0,
        max_position_embeddings=256,
        attn_implementation="eager",
    )
    return transformers.Gemma2ForCausalLM(config).eval()


def with_sinks() -> Any:
    torch.manual_seed(0)
    return build("granite_swa")


FAMILIES = {
    "llama": lambda: random_model("llama"),
    "qwen3": lambda: random_model("qwen3"),
    "gemma3": gemma3,
    "gemma2": gemma2,
    "granite_swa": with_sinks,
}


def run(model: Any, max_batch_tokens: int = 64) -> list[list[int]]:
    settings = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=max_batch_tokens)
    outputs = model.generate_batch(
        PROMPTS, generation_config=settings, continuous_batching_config=batching, warmup=False
    )
    return [outputs[key].generated_tokens for key in sorted(outputs, key=lambda key: int(key.rpartition("_")[2]))]


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in pieces and decode steps of five sequences; the attention is ours in every layer and step."""
    calls = []  # CallCounter sees this thread alone, and transformers' manager has its own

    def counting(*sizes: Any) -> Any:
        calls.append(sizes)
        return window_mask(*sizes)

    monkeypatch.setattr(continuous, "window_mask", counting)
    model = FAMILIES[name]().eval()
    before = model.config._attn_implementation
    want = run(model)
    assert [len(tokens) for tokens in want] == [NEW] * len(PROMPTS)
    with patched(model, strict=True):
        assert run(model) == want
        assert len(calls) >= NEW * len(PROMPTS) * model.config.num_hidden_layers
        assert model.config._attn_implementation == "infini"
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("weights", ["int8"])
def test_quantized_weights(weights: str) -> None:
    """Tokens are those of generate."""
    model = random_model("qwen3").eval()
    with torch.no_grad():
        patch_model(model, weights=weights)
        alone = [
            model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
            for prompt in PROMPTS
        ]
    found = run(model)
    assert found == [one[0, len(prompt) :].tolist() for one, prompt in zip(alone, PROMPTS, strict=True)]


def test_windows() -> None:
    """The mask is that of the definition."""
    for queries, keys, window in ((1, 5, 4), (3, 5, 2), (5, 5, 1), (4, 9, 3)):
        mask = window_mask(queries, keys, window)
        assert mask is not None and mask.shape == (1, 1, queries, keys)
        for s in range(queries):
            at = keys - queries + s
            seen = [j for j in range(keys) if mask[0, 0, s, j] and j <= at]
            assert seen == list(range(max(at - window + 1, 0), at + 1))
    assert window_mask(2, 4, 4) is None and window_mask(2, 400, None) is None


def test_elsewhere() -> None:
    """The name is of generate_batch alone."""
    model = random_model("llama").eval()
    with patched(model):
        model.config._attn_implementation = "infini_flash"
        message = (
            "attn_implementation 'infini_flash' must be used by generate_batch alone, got a call without its cache"
        )
        with pytest.raises(RuntimeError, match=message):
            model.model.layers[0].self_attn(
                torch.zeros(1, 3, 64), position_embeddings=(torch.ones(1, 3, 16), torch.zeros(1, 3, 16)), cache=None
            )
        model.config._attn_implementation = "infini"
