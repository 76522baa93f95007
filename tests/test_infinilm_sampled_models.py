"""Model folders as transformers saves them, drawn at random, through `import infinilm`: tokens are transformers'.

Several files of weights, tied heads, biases, all kinds of rope scaling, windows, lists of end tokens.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_infini import compat
from torch_infini.testing.checkpoints import random_model

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NEW = 12
ROPES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
)


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def drawn(family: str, choose: random.Random) -> dict[str, Any]:
    """What a config may have beside SMALL."""
    heads = choose.choice((2, 4, 6))
    head_dim = choose.choice((8, 16, 32))
    changes: dict[str, Any] = {
        "num_hidden_layers": choose.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": choose.choice([n for n in (1, 2, 3, 6) if heads % n == 0]),
        "hidden_size": heads * head_dim,
        "intermediate_size": choose.choice((40, 96, 130)),
        "tie_word_embeddings": choose.random() < 0.5,
        "rms_norm_eps": choose.choice((1e-5, 1e-6)),
        "max_position_embeddings": 128,
    }
    if family != "qwen2":
        changes["head_dim"] = choose.choice((head_dim, 16))
    if family == "llama":
        changes |= {"attention_bias": choose.random() < 0.5, "mlp_bias": choose.random() < 0.5}
    if family == "mistral":
        changes["sliding_window"] = choose.choice((None, 9))
    rope = choose.choice(ROPES)
    if rope is not None:
        changes["rope_scaling"] = {**rope, "rope_theta": 10000.0}
    return changes


def expected_of(model: Any, prompt: list[int], ends: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, eos_token_id=ends or None
        )
    return list(found[0, len(prompt) :].tolist())


@pytest.mark.parametrize("number", range(16))
def test_a_sampled_model(number: int, tmp_path: Path) -> None:
    choose = random.Random(number)
    family = FAMILIES[number % len(FAMILIES)]
    model: Any = random_model(family, seed=number, **drawn(family, choose)).eval()
    prompts = [[choose.randrange(3, 320) for _ in range(n)] for n in (1, 7, 20)]
    plain = [expected_of(model, prompt, []) for prompt in prompts]
    ends = sorted({plain[0][5], plain[1][3], 319})
    where = choose.choice((model.config, model.generation_config))
    where.eos_token_id = ends
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = [expected_of(model, prompt, ends) for prompt in prompts]
    assert len({len(tokens) for tokens in expected}) > 1

    infer_engine, cache = importlib.import_module("infinilm.infer_engine"), importlib.import_module("infinilm.cache")
    loading, llm = importlib.import_module("infinilm.modeling_utils"), importlib.import_module("infinilm.llm")
    engine = infer_engine.InferEngine(str(tmp_path), cache_config=cache.PagedKVCacheConfig(24, 8))
    loading.load_model_state_dict_by_file(engine, str(tmp_path), dtype=engine.config.dtype)
    settings = infer_engine.GenerationConfig(max_new_tokens=NEW, top_k=1)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert [int(step.to_numpy()[0]) for step in engine.generate([prompt], settings)] == tokens
    served = llm.LLM(str(tmp_path), device="cpu", dtype="float32", num_blocks=32)
    outputs = served.generate(prompts, llm.SamplingParams(max_tokens=NEW), use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
