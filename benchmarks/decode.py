"""Decode and prefill speed of a 1.1B-shape Llama from transformers, as it is and after torch_infini.patch_model, also
with weights="packed".

    python benchmarks/decode.py --threads 1           # results/CPU/decode.csv

Random weights in bfloat16, batch 1; they take turns in every round and medians count. The bandwidth is that of the
weights, which each token of a decode step reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Row
from limits import measure_limits
from torch import Tensor

import torch_infini
from torch_infini.testing.benchmark import interleaved_medians
from torch_infini.testing.shapes import random_of_shape, weight_bytes

PREFILL = 512
CONTEXTS = (16, 512)  # tokens in the cache where decoding begins


def resident_mib() -> float:
    """Memory of this process that is in RAM."""
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith("VmRSS:"):
            return int(row.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmRSS")


def prefill(model: Any, ids: Tensor) -> tuple[float, Any]:
    """(seconds, the model's output) for a prompt; logits of the last token only, as generate() asks for."""
    start = time.perf_counter()
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start, output


def decode(model: Any, ids: Tensor, tokens: int) -> float:
    """Seconds for `tokens` greedy steps after a prompt."""
    _, output = prefill(model, ids)
    start = time.perf_counter()
    for _ in range(tokens):
        token = output.logits[:, -1].argmax(-1, keepdim=True)
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    return time.perf_counter() - start


def measure(layers: int, tokens: int, rounds: int, quick: bool) -> list[Row]:
    limits = measure_limits(128, 1024) if quick else measure_limits()
    model = random_of_shape("tiny" if quick else "1.1B", layers)
    weights = weight_bytes(model)
    prompt = torch.randint(model.config.vocab_size, (1, PREFILL), generator=torch.Generator().manual_seed(0))
    memory: dict[str, float] = {}

    def measurement(variant: str) -> Callable[[], dict[str, float]]:
        def take_times() -> dict[str, float]:
            if variant != "unpatched":
                report = torch_infini.patch_model(model, weights="packed" if variant == "packed" else None)
                if variant not in memory:
                    print(report)
            seconds = {f"decode at {n}": decode(model, prompt[:, :n], tokens) for n in CONTEXTS}
            seconds["prefill"] = prefill(model, prompt)[0]
            memory.setdefault(variant, resident_mib())
            if variant != "unpatched":
                torch_infini.unpatch_model(model)
            return seconds

        return take_times

    variants = ("unpatched", "patched", "packed")
    times = interleaved_medians({variant: measurement(variant) for variant in variants}, rounds)
    rows = []
    for phase in dict.fromkeys(phase for _, phase in times):
        for variant in variants:
            rate = (PREFILL if phase == "prefill" else tokens) / times[variant, phase]
            read = None if phase == "prefill" else weights * rate
            row = {"phase": phase, "variant": variant, "tokens_per_s": rate}
            row["ratio_to_unpatched"] = times["unpatched", phase] / times[variant, phase]
            row["weights_gb_per_s"] = read and read / 1e9
            row["share_of_read_bandwidth"] = read and read / limits.read
            rows.append({**row, "read_gb_per_s": limits.read / 1e9, "resident_mib": memory[variant]})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "decode.csv", threads=[1], rounds=5, quick="a tiny model")
    parser.add_argument("--layers", type=harness.count, default=22, help="fewer for a quick look (default: 22)")
    parser.add_argument("--tokens", type=harness.count, default=32, help="of a decode measurement (default: 32)")
    options = parser.parse_args(argv)
    measured = partial(measure, options.layers, options.tokens, options.rounds, options.quick)
    harness.run(options, (({"layers": options.layers, "threads": n}, measured) for n in options.threads))


if __name__ == "__main__":
    main()
