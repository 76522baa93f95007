"""patch_model on every family it serves: sites, errors beside the original's, tokens, speed of a decode step.

    python benchmarks/families.py        # results/families.csv

Errors and tokens are those of small models (torch_infini/testing/patched_families.py), speed that of a larger shape
in bfloat16, batch 1, one thread, unpatched and patched in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from torch_infini import patched
from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import results_of, write_csv
from torch_infini.testing.patched_families import FAMILIES, LAYERS, Errors, Family, exact_logits, logits, prompts

RESULTS = results_of(__file__)
TOKENS = 128  # generated for the comparison of tokens
SPEED = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
}
CONTEXT, STEPS = 64, 16


@dataclass
class Row:
    """One line of families.csv; errors are means over all logits of 16 prompts, against the model in float64."""

    family: str
    replaced: int
    left: int
    float32_difference: float  # the largest of a logit between patched and unpatched
    bfloat16_error: float
    bfloat16_original: float
    tokens_equal: bool  # greedy, float32
    decode_ms: float
    decode_unpatched_ms: float
    ratio: float


def greedy(model: nn.Module, ids: Tensor) -> Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)


def decode_seconds(model: nn.Module, ids: Tensor) -> float:
    """Seconds of one decode step behind CONTEXT tokens, the mean of STEPS."""
    with torch.no_grad():
        output = model(ids, use_cache=True)
        start = time.perf_counter()
        for _ in range(STEPS):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
        return (time.perf_counter() - start) / STEPS


def speeds(family: Family, rounds: int, shape: dict[str, int]) -> tuple[float, float]:
    """(unpatched, patched): medians of rounds in turns."""
    head = {"head_dim": 64} if "head_dim" in family.config else {}
    model = family.build(torch.bfloat16, **shape, **head)
    ids = torch.randint(2, shape["vocab_size"], (1, CONTEXT), generator=torch.Generator().manual_seed(1))
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):  # the first turn warms up
        for form, kept in zip((nullcontext(), patched(model)), times, strict=True):
            with form:
                taken = decode_seconds(model, ids)
            if turn:
                kept.append(taken)
    return statistics.median(times[0]), statistics.median(times[1])


def measure(family: Family, rounds: int, shape: dict[str, int]) -> Row:
    ids = prompts()
    model = family.build()
    expected, wanted = logits(model, ids), greedy(model, ids[:4])
    with patched(model) as report:
        difference = float((logits(model, ids) - expected).abs().max())
        equal = torch.equal(greedy(model, ids[:4]), wanted)
    exact = exact_logits(family, torch.bfloat16, ids)
    half = family.build(torch.bfloat16)
    original = Errors.of(logits(half, ids), exact)
    with patched(half):
        ours = Errors.of(logits(half, ids), exact)
    before, after = speeds(family, rounds, shape)
    return Row(
        family.name,
        len(report.replaced),
        len(report.left),
        difference,
        ours.mean,
        original.mean,
        equal,
        after * 1e3,
        before * 1e3,
        before / after,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(family.name for family in FAMILIES), metavar="A,B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny shape and one round: to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS / "families.csv")
    options = parser.parse_args(arguments)
    known = {family.name: family for family in FAMILIES}
    names = options.families.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"there is no family {unknown[0]!r}; there are {', '.join(known)}")
    shape = {"vocab_size": 128, "num_hidden_layers": LAYERS} if options.quick else SPEED
    rows = []
    with threads_set_to(1):
        for name in names:
            row = measure(known[name], 1 if options.quick else options.rounds, shape)
            print(f"{name:16} {row.decode_unpatched_ms:8.2f} ms {row.decode_ms:8.2f} ms {row.ratio:6.2f}", flush=True)
            rows.append(row)
    write_csv(options.out, rows, Row)


if __name__ == "__main__":
    main()
