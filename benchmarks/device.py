"""What the device infini adds to the device that backs it: single calls, and generation by a Hugging Face LLaMA.

    python benchmarks/device.py                  # results/CPU/device.csv

The same call on tensors of either device; both take turns in every round, and medians count. above_us is the time on
infini less that on the backing device, ratio the one over the other: at most 1.0 us for add, view and rms_norm, and at
most 1.05 for generate (random weights in bfloat16, a prompt of 16 tokens, times for each new token).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import harness
import torch
from harness import Cases, Row

import torch_infini.device
from torch_infini.testing.benchmark import medians
from torch_infini.testing.shapes import LLAMAS, random_of_shape

PROMPT = 16
Make = Callable[[str], Callable[[], Any]]  # from a device to the call on it


def with_row(call: Callable[[torch.Tensor, torch.Tensor], Any]) -> Make:
    """A call with a row of 2048 elements, and with another of as many."""

    def make(device: str) -> Callable[[], Any]:
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(1, 2048, generator=generator).to(device) for _ in range(2))
        return partial(call, x, y)

    return make


CALLS: dict[str, Make] = {
    "add": with_row(lambda x, y: torch.add(x, y)),
    "add out": with_row(lambda x, y: torch.add(x, x, out=y)),
    "mul_": with_row(lambda x, y: x.mul_(1.0)),
    "view": with_row(lambda x, y: x.view(2048)),
    "transpose": with_row(lambda x, y: x.transpose(0, 1)),
    "slice": with_row(lambda x, y: x[:, :1024]),
    "cat": with_row(lambda x, y: torch.cat([x, y])),
    "empty": with_row(lambda x, y: torch.empty_like(x)),
    "rms_norm": with_row(lambda x, y: torch.ops.infini.rms_norm(x, y[0], 1e-6)),
    "silu": with_row(lambda x, y: torch.ops.infini.silu(x)),
    "aten silu": with_row(lambda x, y: torch.nn.functional.silu(x)),
    "aten rms_norm": with_row(lambda x, y: torch.nn.functional.rms_norm(x, (2048,))),
}


def measure(make: Make, rounds: int, per_call: int = 1) -> Row:
    backing = torch_infini.device.backing()
    times = medians({device: make(device) for device in ("infini", backing)}, rounds)
    ours, theirs = (times[device] / per_call * 1e6 for device in ("infini", backing))
    return {
        "backing": backing,
        "infini_us": ours,
        "backing_us": theirs,
        "above_us": ours - theirs,
        "ratio": ours / theirs,
        "rounds": rounds,
    }


def generation(model: Any, tokens: int) -> Make:
    """Greedy generation of so many tokens by a copy of the model."""

    def make(device: str) -> Callable[[], Any]:
        there = copy.deepcopy(model).to(device)
        ids = torch.randint(0, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        return partial(there.generate, ids.to(device), **settings)

    return make


def cases(options: Any) -> Cases:
    torch_infini.device.enable(options.backing)
    rounds = options.rounds
    for threads in options.threads:
        for name, make in CALLS.items():
            yield {"case": name, "threads": threads}, partial(measure, make, rounds)
    shape, tokens = ("tiny", 4) if options.quick else (options.shape, options.tokens)
    model = random_of_shape(shape).eval()
    for threads in options.threads:
        key = {"case": f"generate {shape}", "threads": threads}
        yield key, partial(measure, generation(model, tokens), rounds, tokens)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "device.csv", threads=[1], rounds=15, quick="a tiny model and 4 tokens")
    parser.add_argument("--backing", choices=("cpu", "cuda"), default="cpu", help="what computes (default: cpu)")
    parser.add_argument("--shape", choices=LLAMAS, default="160M", help="of the model (default: 160M)")
    parser.add_argument("--tokens", type=harness.count, default=32, help="that are generated (default: 32)")
    options = parser.parse_args(argv)
    harness.run(options, cases(options))


if __name__ == "__main__":
    main()
