"""Where the time of the engine's decode step goes: linear, attention, norms and the like, sampling, the host.

    python benchmarks/step_profile.py --shape 1.1B --weights int8        # results/CPU/step_profile.csv

Milliseconds a step. A recorded step's time, and what its replay and the sampler take of it, are medians; outside_ms is
neither: scheduling, inputs, outputs. torch.profiler cannot see into a replay, so ops are timed in unrecorded steps of
another engine, which takes turns with the first. host_ms is what the ops leave of the recorded step; where it is below
0 the profiler's own cost of each op is more than all of the host's. linear_gb_per_s is of weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
from harness import MODELS, Cases, Row, count, counts
from steps import profiled_ms

from torch_infini import LLM, SamplingParams
from torch_infini._core.bandwidth import read_bandwidth
from torch_infini.models import Llama
from torch_infini.testing.shapes import LLAMAS, saved_shape

WEIGHTS = ("dense", "int8", "int4")
# Beginnings of names of ops, and where their time is counted; rope is in the op that also writes to the cache.
KINDS = {
    "infini::linear": "linear",
    "infini::paged_attention": "attention",
    "infini::random_sample": "sampling",
    "infini::log_softmax": "sampling",
    "infini::": "norms_rope_activations",
}


def ready(model: Llama, batch: int, context: int, steps: int, record: bool) -> LLM:
    """An engine whose next `steps` steps decode `batch` sequences, from `context` tokens on."""
    length = context + steps + 2
    llm = LLM(
        model,
        max_num_seqs=batch,
        max_model_len=length,
        cache_blocks=batch * (length // 32 + 2),
        block_size=32,
        max_num_batched_tokens=batch * context,  # all begin in the first step
        enable_prefix_caching=False,
        enforce_eager=not record,
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


def measure(model: Llama, batch: int, context: int, steps: int) -> Row:
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
    ops = dict.fromkeys(KINDS.values(), 0.0)
    for name, ms in profiled_ms(unrecorded.engine.step, steps).items():
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), None)
        if kind is not None:  # else it is the host's: inputs and outputs
            ops[kind] += ms
    linear = (module for module in model.modules() if type(module).__name__ == "Linear")
    weight_bytes = sum(p.nbytes for module in linear for p in module.parameters())
    return {
        "step_ms": whole,
        **{f"{kind}_ms": ms for kind, ms in ops.items()},
        "host_ms": whole - sum(ops.values()),
        "replay_ms": replay.median,
        "sampler_ms": sampler.median,
        "outside_ms": whole - replay.median - sampler.median,
        "unrecorded_step_ms": plain.median,
        "linear_gb_per_s": weight_bytes / ops["linear"] / 1e6,
        "read_gb_per_s": read_bandwidth(0.2) / 1e9,
    }


def cases(options: argparse.Namespace) -> Cases:
    checkpoint = saved_shape(options.shape, options.folder / "models")
    for weights in options.weights or WEIGHTS:
        model = Llama.from_pretrained(checkpoint, weights, progress=False)
        for threads, batch, context in product(options.threads, options.batch, options.context):
            key = {"shape": options.shape, "weights": weights, "batch": batch, "context": context, "threads": threads}
            yield key, partial(measure, model, batch, context, options.steps)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "step_profile.csv", threads=[1])
    parser.add_argument("--shape", choices=[*LLAMAS], default="1.1B", help="default: 1.1B")
    parser.add_argument("--weights", choices=WEIGHTS, action="append", help="several times for several (default: all)")
    parser.add_argument("--batch", type=counts, default=[1], help="sequences (default: 1)")
    parser.add_argument("--context", type=counts, default=[16], help="tokens in the cache (default: 16)")
    parser.add_argument("--steps", type=count, default=32, help="of a measurement (default: 32)")
    parser.add_argument("--folder", type=Path, default=MODELS, help="where models are kept (build/peers)")
    options = parser.parse_args(argv)
    harness.run(options, cases(options))


if __name__ == "__main__":
    main()
