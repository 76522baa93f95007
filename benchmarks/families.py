"""patch_model on every family it serves: sites, errors beside the original's, tokens, speed of a decode step.

    python benchmarks/families.py        # results/CPU/families.csv

Errors and tokens are those of small models (torch_infini/testing/patched_families.py): float32_difference is the
largest of a logit between patched and unpatched; bfloat16_error and bfloat16_original are means over all logits of 16
prompts, against the model in float64; tokens_equal is of greedy tokens in float32. Speed is that of a larger shape in
bfloat16, batch 1, one thread, unpatched and patched in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import harness
import torch
from harness import Row
from torch import Tensor, nn

from torch_infini import patched
from torch_infini.testing.benchmark import interleaved_medians
from torch_infini.testing.patched_families import FAMILIES, LAYERS, Errors, Family, exact_logits, logits, prompts

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


def decoding(
    form: Callable[[nn.Module], AbstractContextManager[Any]], model: nn.Module, ids: Tensor
) -> Callable[[], dict[str, float]]:
    def measure() -> dict[str, float]:
        with form(model):
            return {"decode": decode_seconds(model, ids)}

    return measure


def speeds(family: Family, rounds: int, shape: dict[str, int]) -> tuple[float, float]:
    """(unpatched, patched): medians of rounds in turns."""
    head = {"head_dim": 64} if "head_dim" in family.config else {}
    model = family.build(torch.bfloat16, **shape, **head)
    ids = torch.randint(2, shape["vocab_size"], (1, CONTEXT), generator=torch.Generator().manual_seed(1))
    forms = {"unpatched": decoding(nullcontext, model, ids), "patched": decoding(patched, model, ids)}
    times = interleaved_medians(forms, rounds)
    return times["unpatched", "decode"], times["patched", "decode"]


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
    return {
        "replaced": len(report.replaced),
        "left": len(report.left),
        "float32_difference": difference,
        "bfloat16_error": ours.mean,
        "bfloat16_original": original.mean,
        "tokens_equal": equal,
        "decode_ms": after * 1e3,
        "decode_unpatched_ms": before * 1e3,
        "ratio": before / after,
    }


def main(argv: Sequence[str] | None = None) -> None:
    known = {family.name: family for family in FAMILIES}
    parser = harness.new_parser(__doc__, "families.csv", rounds=5, quick="a tiny shape and one round")
    families = harness.names("family", [*known])
    parser.add_argument("--families", type=families, default=[*known], metavar="A,B", help="default: all")
    options = parser.parse_args(argv)
    shape = {"vocab_size": 128, "num_hidden_layers": LAYERS} if options.quick else SPEED
    rounds = 1 if options.quick else options.rounds
    cases = (
        ({"family": name, "threads": 1}, partial(measure, known[name], rounds, shape)) for name in options.families
    )
    harness.run(options, cases)


if __name__ == "__main__":
    main()
