"""Small models in folders, engines of them, and lists of tokens: for the tests of infinilm around its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torch_infini.compat import infinicore
from torch_infini.compat.infinilm import modeling_utils
from torch_infini.compat.infinilm.infer_engine import GenerationConfig, InferEngine
from torch_infini.testing.checkpoints import random_model

from .rounding import greedy_tokens

FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 6}, "qwen2": {}, "qwen3": {}}
PROMPTS = [[5, 6, 7, 8, 9], [300, 2, 2, 17, 40], [9, 200, 31, 8, 77]]
NEW = 8
GREEDY = GenerationConfig(max_new_tokens=NEW, top_k=1)


def greedy(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """transformers' tokens behind one prompt."""
    ids = torch.tensor([prompt])
    tokens = greedy_tokens(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=new)
    return tokens[0, len(prompt) :].tolist()


def saved(name: str, folder: Path) -> tuple[Path, list[list[int]]]:
    """Save a model of a family; return its folder and transformers' tokens behind PROMPTS."""
    model = random_model(name, **FAMILIES[name])
    model.save_pretrained(folder)
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)  # or a mixed-up row would not be seen
    return folder, expected


def loaded(folder: Path, cache: Any = None) -> InferEngine:
    """An engine as scripts make it."""
    engine = InferEngine(str(folder), device=infinicore.device("cpu", 0), cache_config=cache)
    modeling_utils.load_model_state_dict_by_file(engine, str(folder), dtype=engine.dtype)
    return engine


def infini(values: Any) -> infinicore.Tensor:
    return infinicore.from_list(values, dtype=infinicore.int64)


def by_row(steps: list[Any]) -> list[list[int]]:
    return [list(tokens) for tokens in zip(*(step.to_numpy().tolist() for step in steps), strict=True)]
