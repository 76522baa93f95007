"""Where the time of the engine's decode step goes: linear, attention, norms and the like, sampling, the host.

    python benchmarks/step_profile.py --shape 1.1B --weights int8

A recorded step's time, and what its replay and the sampler take of it, are medians. torch.profiler cannot see into a
replay, so ops are timed in unrecorded steps of another engine, which takes turns with the first. host_ms is what the
ops leave of the recorded step; where it is below 0 the profiler's own cost of each op is more than all of the host's.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from torch_infini import LLM, SamplingParams
from torch_infini._bandwidth import read_bandwidth
from torch_infini.models import Llama
from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import count, counts, write_csv
from torch_infini.testing.llama import SHAPES, random_llama

FOLDER = Path(__file__).parents[1] / "build" / "peers"
WEIGHTS = ("dense", "int8", "int4")
# Beginnings of names of ops, and where their time is counted; rope is in the op that also writes to the cache.
KINDS = {
    "infini::linear": "linear",
    "infini::paged_attention": "attention",
    "infini::random_sample": "sampling",
    "infini::log_softmax": "sampling",
    "infini::": "norms_rope_activations",
}


@dataclass
class Row:
    """One line of the CSV, times in milliseconds a step; outside_ms: of the recorded step, what is neither in the
    replay nor in the sampler: scheduling, inputs, outputs."""

    shape: str
    weights: str
    batch: int
    context: int
    threads: int
    step_ms: float
    linear_ms: float
    attention_ms: float
    norms_rope_activations_ms: float
    sampling_ms: float
    host_ms: float
    replay_ms: float
    sampler_ms: float
    outside_ms: float
    unrecorded_step_ms: float
    linear_gb_per_s: float  # of weights
    read_gb_per_s: float


def ready(model: Llama, batch: int, context: int, steps: int, record: bool) -> LLM:
    """An engine whose next `steps` steps decode `batch` sequences, from `context` tokens on."""
    length = context + steps + 2
    llm = LLM(
        model,
        max_sequences=batch,
        max_length=length,
        cache_blocks=batch * (length // 32 + 2),
        block_size=32,
        max_batched_tokens=batch * context,  # all begin in the first step
        reuse_prefixes=False,
        record=record,
    )
    source = torch.Generator().manual_seed(0)
    params = SamplingParams.greedy(max_tokens=steps + 2, ignore_eos=True)
    for _ in range(batch):
        llm.engine.add(torch.randint(model.config.vocab_size, (context,), generator=source).tolist(), params)
    while llm.metrics().generated_tokens < 2 * batch:  # the prompts, and a step that records
        llm.engine.step()
    return llm


class Timed:
    """A call whose times are kept."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.ms = call, list[float]()

    def __call__(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = self.call(*arguments)
        self.ms.append((time.perf_counter() - start) * 1e3)
        return result

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


def measure(model: Llama, batch: int, context: int, steps: int, **case: Any) -> Row:
    recorded, unrecorded = (ready(model, batch, context, 3 * steps, record) for record in (True, False))
    runner = recorded.engine._runner
    decode = runner._steps.step(batch, runner._width)
    replay = decode._replay = Timed(decode._replay)
    sampler = recorded.engine._sampler = Timed(recorded.engine._sampler)  # type: ignore[assignment]
    step, plain = Timed(recorded.engine.step), Timed(unrecorded.engine.step)
    for _ in range(steps):
        step()
        plain()
    whole = step.median
    for _ in range(2):  # the first one's first events are slow
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                unrecorded.engine.step()
    ops = dict.fromkeys(KINDS.values(), 0.0)
    for event in profiler.key_averages():
        kind = next((kind for start, kind in KINDS.items() if event.key.startswith(start)), None)
        if kind is not None:  # else it is the host's: inputs and outputs
            ops[kind] += event.self_cpu_time_total / 1e3 / steps
    linear = (module for module in model.modules() if type(module).__name__ == "Linear")
    weight_bytes = sum(p.nbytes for module in linear for p in module.parameters())
    return Row(
        batch=batch,
        context=context,
        step_ms=whole,
        **{f"{kind}_ms": ms for kind, ms in ops.items()},
        host_ms=whole - sum(ops.values()),
        replay_ms=replay.median,
        sampler_ms=sampler.median,
        outside_ms=whole - replay.median - sampler.median,
        unrecorded_step_ms=plain.median,
        linear_gb_per_s=weight_bytes / ops["linear"] / 1e6,
        read_gb_per_s=read_bandwidth(0.2) / 1e9,
        **case,
    )


def load(shape: str, weights: Any, folder: Path) -> Llama:
    """The model of a shape; its checkpoint is made where there is none."""
    path = folder / "models" / shape
    if not (path / "model.safetensors").exists():
        random_llama(shape).save_pretrained(path)
    return Llama.from_pretrained(path, weights, progress=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="1.1B", help="default: 1.1B")
    parser.add_argument("--weights", choices=WEIGHTS, action="append", help="several times for several (default: all)")
    parser.add_argument("--batch", type=counts, default=[1], help="sequences (default: 1)")
    parser.add_argument("--context", type=counts, default=[16], help="tokens in the cache (default: 16)")
    parser.add_argument("--threads", type=counts, default=[1], help="default: 1")
    parser.add_argument("--steps", type=count, default=32, help="of a measurement (default: 32)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where models are kept (build/peers)")
    parser.add_argument("--out", type=Path, help="CSV file (default: none, the table is on stdout)")
    options = parser.parse_args(argv)
    out = csv.DictWriter(sys.stdout, [field.name for field in fields(Row)])
    out.writeheader()
    rows = []
    for weights in options.weights or WEIGHTS:
        model = load(options.shape, weights, options.folder)
        cases = [(n, batch, context) for n in options.threads for batch in options.batch for context in options.context]
        for threads, batch, context in cases:
            with threads_set_to(threads):
                case = {"shape": options.shape, "weights": weights, "threads": threads}
                rows.append(measure(model, batch, context, options.steps, **case))
            out.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in asdict(rows[-1]).items()})
            sys.stdout.flush()
    if options.out is not None:
        write_csv(options.out, rows, Row)


if __name__ == "__main__":
    main()
