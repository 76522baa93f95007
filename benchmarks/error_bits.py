"""Error of the logits against bits a weight: the engine's formats of integers, those of llama.cpp and of ik_llama.cpp.

    python benchmarks/error_bits.py --shapes 160M,1.1B      # results/CPU/error-bits.csv, and a plot beside it

logit_error is that of generate.py, of the same models with random weights. bits_per_weight: of all linear layers, the
head among them, as they lie in memory, with scales; each format has the mixture that its engine makes of it by itself.
The embedding does not count. Nothing is timed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import harness
import plot
import torch
from contestants import Contestants, add_options
from harness import Cases, Row
from peers.engines import Failure
from safetensors import safe_open

from torch_infini.testing.shapes import LLAMAS
from torch_infini.weights import served

FORMATS = {
    "llama.cpp": ("Q4_0", "IQ4_XS", "Q4_K_S", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"),
    "ik_llama.cpp": ("IQ4_KS", "IQ4_K", "IQ5_K"),
    "engine": served(),
}


def linear_weights(checkpoint: Path) -> int:
    """How many weights the linear layers of a checkpoint have: all its matrices but the embedding."""
    count = 0
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                shape = file.get_slice(name).get_shape()
                count += math.prod(shape) if len(shape) == 2 and "embed_tokens" not in name else 0
    return count


def measure(models: Contestants, shape: str, engine: str, format: str) -> Row:
    row: Row = {"bits_per_weight": None, "logit_error": None, "version": "", "note": ""}
    checkpoint = models.checkpoint(shape)
    try:
        # Workers of GGUF files take the format from the variant, the engine takes it from the dtype.
        found = models.start(engine, engine, format, checkpoint, format, torch.get_num_threads())
    except Failure as failure:
        return row | {"note": str(failure)}
    found.process.close()
    bits = 8 * found.linear_bytes / linear_weights(checkpoint)
    return row | {"bits_per_weight": bits, "logit_error": found.logit_error, "version": found.version}


def cases(options: argparse.Namespace) -> Cases:
    models = Contestants(options.folder, options.patience)
    for shape in options.shapes:
        for engine in options.peers:
            for format in FORMATS[engine]:
                key = {"shape": shape, "engine": engine, "format": format}
                yield key, partial(measure, models, **key)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "error-bits.csv")
    parser.add_argument("--shapes", type=harness.names("shape", [*LLAMAS]), default=["160M"], help="default: 160M")
    all_peers = f"default: {','.join(FORMATS)}"
    parser.add_argument("--peers", type=harness.names("peer", [*FORMATS]), default=[*FORMATS], help=all_peers)
    add_options(parser)
    options = parser.parse_args(argv)
    harness.run(options, cases(options))
    print(f"drawn in {plot.write(options.out)}")


if __name__ == "__main__":
    main()
