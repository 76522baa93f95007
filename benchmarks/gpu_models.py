"""Decode steps of whole Llama models on a GPU, for gpu.py: a patched model over a static cache, captured in one graph,
beside the unpatched model, eager and compiled by torch with reduce-overhead.

Random weights, batch 1. The limit of a step is the time in which its weights can be read at the bandwidth of the copy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from gpu_measure import DEVICE, GPU, Case, Machine, captured, row_of, seconds_of
from harness import Row, first_line

import torch_infini
from torch_infini.testing.shapes import random_of_shape, weight_bytes

CONTEXT = 64  # tokens before the first step that is timed
STEPS = 64


def decoder(model: Any, device: str) -> tuple[Callable[[], Any], Callable[[], None]]:
    """(a decode step over a static cache that has CONTEXT tokens, what puts the cache back to there)."""
    from transformers import StaticCache  # which only these cases need

    cache = StaticCache(config=model.config, max_cache_len=CONTEXT + STEPS + 8)
    ids = torch.randint(model.config.vocab_size, (1, CONTEXT), device=device)
    token = ids[:, :1].clone()
    position = torch.full((1, 1), CONTEXT, device=device)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)

    def step() -> Any:
        with torch.no_grad():
            logits = model(input_ids=token, past_key_values=cache, position_ids=position, logits_to_keep=1).logits
            token.copy_(logits[:, -1].argmax(-1, keepdim=True))
            position.add_(1)

    def reset() -> None:
        position.fill_(CONTEXT)
        for layer in cache.layers:
            layer.cumulative_length.fill_(CONTEXT)

    return step, reset


def step_seconds(run: Callable[[], Any], reset: Callable[[], None], rounds: int, steps: int) -> float:
    """Median over the rounds of the mean time of a step."""

    def all_steps() -> None:
        for _ in range(steps):
            run()

    times = []
    for _ in range(rounds + 1):
        reset()
        times.append(seconds_of(all_steps) / steps)
    return statistics.median(times[1:])


def measure_model(
    case: Case, shape: str, weights: str | None, machine: Machine, with_compile: bool, quick: bool
) -> Row:
    """The row of one shape and format of weights."""
    steps, rounds = (4, 1) if quick else (STEPS, 5)
    with torch.device(DEVICE):  # where random numbers are made in a moment
        model = random_of_shape(shape)
    notes = []
    peers: dict[str, float] = {}
    if weights is None:
        step, reset = decoder(model, DEVICE)
        peers["eager"] = step_seconds(step, reset, rounds, steps)
    if weights is None and with_compile and GPU:
        try:
            forward = model.forward
            model.forward = torch.compile(forward, mode="reduce-overhead", fullgraph=True)
            step, reset = decoder(model, DEVICE)
            step()
            step()
            peers["compile"] = step_seconds(step, reset, rounds, steps)
        except Exception as error:  # whatever the compiler raises is a result to report
            notes.append(f"compile fails: {first_line(error)}")
        finally:
            del model.forward
            torch._dynamo.reset()
    torch_infini.patch_model(model, weights=weights, strict=True)
    size = weight_bytes(model)
    step, reset = decoder(model, DEVICE)
    step()
    run = captured(step)
    ours = step_seconds(run, reset, rounds, steps)
    share = size / ours / machine.copy
    goal, met = "", ""
    if weights is None and not quick:
        least, ratio = (0.45, 8.0) if shape == "1.1B" else (0.70, 0.0)
        goal = f"{least:.2f} of the weights' limit" + (f", {ratio:g} x eager" if ratio else "")
        met = "yes" if share >= least and peers["eager"] >= ratio * ours else "no"
    us = {f"{name}_us": value * 1e6 for name, value in {"infini": ours, **peers}.items()}
    return row_of(case, **us, bytes=size, share=share, goal=goal, met=met, note="; ".join(notes))
