"""Decode and prefill speed of a 1.1B-shape Llama from transformers, as it is and after torch_infini.patch_model.

    python benchmarks/decode.py --threads 1

Random weights in bfloat16, batch 1; the two take turns in every round and medians count. Writes CSV.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torch_infini
from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import measure_limits, results_of, write_csv
from torch_infini.testing.llama import random_llama, weight_bytes

PREFILL = 512
CONTEXTS = (16, 512)  # tokens in the cache where decoding begins
RESULTS = results_of(__file__)


@dataclass
class Row:
    """One line of the CSV. Bandwidth is that of the bfloat16 weights that each token of a decode step reads."""

    phase: str
    variant: str
    layers: int
    threads: int
    tokens_per_s: float
    ratio_to_unpatched: float
    weights_gb_per_s: float | None
    share_of_read_bandwidth: float | None
    read_gb_per_s: float
    resident_mib: float


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


def run(layers: int, threads: int, tokens: int, rounds: int) -> list[Row]:
    with threads_set_to(threads), torch.no_grad():
        limits = measure_limits()
        model = random_llama("1.1B", layers)
        weights = weight_bytes(model)
        prompt = torch.randint(32000, (1, PREFILL), generator=torch.Generator().manual_seed(0))
        times: dict[tuple[str, str], list[float]] = {}
        memory: dict[str, float] = {}
        for turn in range(rounds + 1):
            for variant in ("unpatched", "patched"):
                if variant == "patched":
                    report = torch_infini.patch_model(model)
                    if turn == 0:
                        print(report)
                seconds = {f"decode at {n}": decode(model, prompt[:, :n], tokens) for n in CONTEXTS}
                seconds["prefill"] = prefill(model, prompt)[0]
                if turn == 0:  # the first turn warms up
                    memory[variant] = resident_mib()
                else:
                    for phase, value in seconds.items():
                        times.setdefault((phase, variant), []).append(value)
                if variant == "patched":
                    torch_infini.unpatch_model(model)
    rates = {
        (phase, variant): (PREFILL if phase == "prefill" else tokens) / statistics.median(values)
        for (phase, variant), values in times.items()
    }
    rows = []
    for phase in dict.fromkeys(phase for phase, _ in rates):
        for variant in ("unpatched", "patched"):
            rate = rates[phase, variant]
            read = None if phase == "prefill" else weights * rate
            rows.append(
                Row(
                    phase=phase,
                    variant=variant,
                    layers=layers,
                    threads=threads,
                    tokens_per_s=rate,
                    ratio_to_unpatched=rate / rates[phase, "unpatched"],
                    weights_gb_per_s=read and read / 1e9,
                    share_of_read_bandwidth=read and read / limits.read,
                    read_gb_per_s=limits.read / 1e9,
                    resident_mib=memory[variant],
                )
            )
    return rows


def line(row: Row) -> str:
    text = f"{row.phase:13} {row.variant:10} {row.tokens_per_s:8.2f} tokens/s"
    text += f", {row.ratio_to_unpatched:5.2f} times unpatched, {row.resident_mib:.0f} MiB resident"
    if row.weights_gb_per_s is not None and row.share_of_read_bandwidth is not None:
        text += f", weights at {row.weights_gb_per_s:.1f} GB/s"
        text += f", {row.share_of_read_bandwidth:.0%} of {row.read_gb_per_s:.1f}"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=22, help="fewer for a quick look (default: 22)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a decode measurement (default: 32)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "decode.csv", help="CSV file (default: results/decode.csv)"
    )
    options = parser.parse_args(argv)
    rows = run(options.layers, options.threads, options.tokens, options.rounds)
    for row in rows:
        print(line(row))
    write_csv(options.out, rows, Row)
    print(f"{len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()
