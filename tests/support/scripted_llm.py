"""A small model that writes what a test says, token by token, for tests of what servers make of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_infini import AsyncLLM
from torch_infini.testing.checkpoints import random_model

SPECIAL = ["<eos>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|python_tag|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
Say = Callable[..., None]  # (text, chat template)


@contextmanager
def scripted_llm(folder: Path, template: str) -> Iterator[AsyncLLM]:
    """Give a small model with a chat template, whose tokens are bytes and markers, some of them special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.set_num_threads(1)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(PLAIN)
    model = random_model("llama")
    model.config.max_position_embeddings = 2048
    model.config.eos_token_id = tokenizer.token_to_id("<eos>")
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    made = AsyncLLM(folder, enable_prefix_caching=False)
    yield made
    made.close()


def sayer(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Return a function that makes the model write a text, and sets its chat template."""

    def say(text: str, template: str | None = None) -> None:
        if template is not None:
            monkeypatch.setattr(llm.engine.tokenizer, "chat_template", template)
        tokenizer: Any = llm.engine.tokenizer
        tokens = tokenizer(text + "<eos>", add_special_tokens=False)["input_ids"]
        make = type(llm.engine).new_request

        def only(generated: Any, logits: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(logits, -1e4)
            forced[tokens[min(len(generated), len(tokens) - 1)]] = 0
            return forced

        def new_request(prompt: Any, params: Any, *more: Any) -> Any:
            return make(llm.engine, prompt, replace(params, logits_processors=(only,)), *more)

        monkeypatch.setattr(llm.engine, "new_request", new_request)

    return say
