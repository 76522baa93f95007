"""Replays of one decode layer: recorded by torch_infini.runtime.record, beside runtime.program and eager calls.

    python benchmarks/record.py --hidden 256,2048 --rows 1,8        # results/CPU/record.csv

Microseconds a call, medians in turns. `infini` is a DecoderLayer of torch_infini.nn, whose replay by record has the
kernel calls of program's. `torch` is an MLP of torch's own ops, which only record takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import harness
import torch
import torch.nn.functional as F
from harness import Cases, Row, counts, ratios, taken
from torch import Tensor

from torch_infini.models import Llama, LlamaConfig
from torch_infini.nn import Batch
from torch_infini.runtime import program, record
from torch_infini.testing.benchmark import medians

CONTEXT, BLOCK = 64, 16  # tokens of each sequence; of a block of the cache


def layer_call(hidden: int, rows: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call of a decoder layer on one new token of each of `rows` sequences."""
    heads = max(hidden // 64, 1)
    config = LlamaConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": 64,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
        }
    )
    model = Llama(config)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
    blocks = CONTEXT // BLOCK
    cache = model.new_cache(rows * blocks, BLOCK)
    for tensor in (cache.keys, cache.values):
        tensor.normal_()
    last = torch.full((rows,), CONTEXT - 1)
    tables = torch.arange(rows * blocks).view(rows, blocks)
    batch = Batch(torch.zeros(rows, dtype=torch.int64), last, tables[:, -1] * BLOCK + BLOCK - 1, tables, last + 1)
    x = torch.randn(rows, hidden)
    return lambda: model.layers[0](x, None, batch, cache.layer(0))


def torch_call(hidden: int, rows: int) -> Callable[[], Tensor]:
    """A call of a norm and an MLP in ops of torch."""
    x, weight = torch.randn(rows, hidden), torch.ones(hidden)
    gate, up, down = (torch.randn(*size) / hidden**0.5 for size in 2 * [(3 * hidden, hidden)] + [(hidden, 3 * hidden)])

    def call() -> Tensor:
        h = F.rms_norm(x, (hidden,), weight)
        return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    return call


def measure(kind: str, hidden: int, rows: int) -> Row:
    with torch.no_grad():
        call = (layer_call if kind == "infini" else torch_call)(hidden, rows)
        calls = {"record": record(call).run, "eager": call}
        if kind == "infini":
            calls["program"] = program(call).replay
        times = medians(calls, rounds=15, least=0.005)
    return {**taken(times, "record", "program", "eager"), **ratios(times, "program", "eager", to="record")}


def cases(options: argparse.Namespace) -> Cases:
    for kind, hidden, rows in product(("infini", "torch"), options.hidden, options.rows):
        yield {"ops": kind, "hidden": hidden, "rows": rows, "threads": 1}, partial(measure, kind, hidden, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "record.csv")
    parser.add_argument("--hidden", type=counts, default=[256, 2048], help="columns of the residual stream")
    parser.add_argument("--rows", type=counts, default=[1, 8], help="sequences, with one new token each")
    options = parser.parse_args(argv)
    harness.run(options, cases(options))


if __name__ == "__main__":
    main()
