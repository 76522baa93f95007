"""How generate.py talks to a worker: a process that holds one model of one engine, in that engine's own environment.

One JSON object a line on stdin, {"call": "decode", "arguments": {...}}, is answered by one on stdout, {"result": ...}
or {"error": "..."}. Needs the standard library only.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any


class Unavailable(Exception):
    """An engine has no such thing; says so by itself."""


class Worker:
    """What a worker can be asked for. Times are in seconds, of the engine's own work only."""

    def load(self, folder: str, variant: str, dtype: str, threads: int) -> dict[str, Any]:
        """Load the model of a Hugging Face checkpoint folder, after converting it if that has not been done.

        Args:
            folder: The checkpoint, in bfloat16; converted models are kept in it.
            variant: What tells engines or formats of one worker apart.
            dtype: Of the weights: float32, bfloat16, int8 or int4.
            threads: To compute with.

        Returns:
            version: A text. weight_bytes: what a decode step of one token reads, all weights but the embedding and the
            experts that are not chosen. linear_bytes: of all weights but the embedding, those of linear layers; from
            the workers that error_bits.py asks.
        """
        raise NotImplementedError

    def logits(self, tokens: list[int], prompt: int, out: str) -> None:
        """Write logits to a file of float32 values: of the last of `prompt` tokens run at once, then of the rest, run
        one by one."""
        raise NotImplementedError

    def decode(self, batch: int, context: int, steps: int) -> float:
        """Greedy steps of `batch` sequences that have `context` tokens in the cache."""
        raise NotImplementedError

    def prefill(self, tokens: int) -> float:
        """A prompt from an empty cache to the logits of its last token."""
        raise NotImplementedError

    def generate(self, prompt: int, steps: int) -> float:
        """The engine's own generate() for a prompt and exactly `steps` greedy tokens."""
        raise NotImplementedError

    def serve(self, prompts: list[list[int]], outputs: list[int]) -> float:
        """All requests at once, from nothing to the last greedy token; of each exactly so many tokens. No prompt may
        be answered out of a cache."""
        raise NotImplementedError

    def prefix(self, tokens: int) -> dict[str, float]:
        """To the first token of a request, by whether its first `tokens` tokens were in a request before it."""
        raise NotImplementedError

    def read(self) -> dict[str, float]:
        """To load the checkpoint again, under "", and to read its files into fresh memory, by the kind of its pages."""
        raise NotImplementedError

    def release(self) -> None:
        """Free caches and compiled code: another cell follows."""


def config_of(folder: str | Path) -> dict[str, Any]:
    """The config of a checkpoint folder."""
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return config


def vocabulary(folder: str) -> int:
    """Tokens that the model of a checkpoint folder knows."""
    return int(config_of(folder)["vocab_size"])


def chosen_share(folder: str) -> float:
    """The share of a mixture's experts that a token chooses; 1 without experts."""
    config = config_of(folder)
    return config["num_experts_per_tok"] / config["num_local_experts"] if "num_local_experts" in config else 1.0


def prompt(batch: int, length: int, vocabulary: int) -> list[list[int]]:
    """The same random tokens for every engine."""
    source = random.Random(0)
    return [[source.randrange(vocabulary) for _ in range(length)] for _ in range(batch)]


def requests(count: int, vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 32 to 512 random tokens, and how many are wanted behind each, 16 to 128: the same for every engine."""
    source = random.Random(1)
    lengths = [(source.randint(32, 512), source.randint(16, 128)) for _ in range(count)]
    prompts = [[source.randrange(vocabulary) for _ in range(prompt)] for prompt, _ in lengths]
    return prompts, [output for _, output in lengths]


def longest(prompts: list[list[int]], outputs: list[int]) -> int:
    """Tokens of the longest request, with its output."""
    return max(len(prompt) + output for prompt, output in zip(prompts, outputs, strict=True))


def seconds_to_generate(model: Any, ids: Any, steps: int, **options: Any) -> float:
    """Of the greedy generate() of a transformers model, `steps` new tokens behind ids [batch, prompt]."""
    options.setdefault("attention_mask", ids.new_ones(ids.shape))
    options |= {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}
    start = time.perf_counter()
    result = model.generate(ids, **options)
    seconds = time.perf_counter() - start
    if result.shape[1] != ids.shape[1] + steps:
        raise RuntimeError(f"generate made {result.shape[1] - ids.shape[1]} tokens instead of {steps}")
    return seconds


def serve(worker: Worker) -> None:
    """Answer until stdin ends. What libraries print to stdout goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"result": getattr(worker, request["call"])(**request["arguments"])}
            except Exception as error:
                traceback.print_exc()
                words = str(error) if isinstance(error, Unavailable) else f"{request['call']}: {error!r}"
                answer = {"error": " ".join(words.split())[:300]}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
