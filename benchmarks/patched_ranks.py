"""A Hugging Face model on two ranks of one machine, as transformers shards it and patched, beside one process.

    python benchmarks/patched_ranks.py        # results/CPU/patched-ranks.csv

Decode steps in bfloat16, batch 1, behind 64 tokens; each rank has one thread, the one process has two. The contestants
take turns in every round; rank 0's clock counts, the median over the rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from families import CONTEXT, decode_seconds
from harness import Row, taken

from torch_infini import patched
from torch_infini.testing.benchmark import interleaved_medians
from torch_infini.testing.checkpoints import random_model
from torch_infini.testing.processes import forking
from torch_infini.testing.shapes import random_of_shape

IMPORTED = ("distributed", "models.auto.modeling_auto", "models.llama.modeling_llama")
THREADS = 2  # of all ranks together
WORLDS = {"one process": (1, ""), "two ranks, gloo": (2, "gloo"), "two ranks, infiniccl": (2, "infiniccl")}


class World:
    """Processes that share a model, or one that has all of it."""

    def __init__(self, size: int, backend: str, folder: Path) -> None:
        context = forking(*(f"transformers.{name}" for name in IMPORTED))
        self.pipes, self.processes = [], []
        with tempfile.NamedTemporaryFile(delete=False) as store:
            pass
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (there, rank, size, backend, store.name, folder)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def seconds(self, form: str) -> float:
        """Of one decode step."""
        for pipe in self.pipes:
            pipe.send(form)
        return [pipe.recv() for pipe in self.pipes][0]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join()


def serve(pipe: Any, rank: int, size: int, backend: str, store: str, folder: Path) -> None:
    """One rank: the time of a decode step, as often as it is asked for."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(THREADS // size)
    options = {}
    if size > 1:
        dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=size)
        options = {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    ids = torch.randint(model.config.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(1))
    while True:
        try:
            form = pipe.recv()
        except EOFError:
            break
        with patched(model) if form == "patched" else nullcontext():
            pipe.send(decode_seconds(model, ids))
    if size > 1:
        dist.destroy_process_group()


def measure(shape: str, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        model = random_model("llama", torch.bfloat16) if shape == "small" else random_of_shape(shape)
        model.save_pretrained(folder)
        worlds = {name: World(*arguments, Path(folder)) for name, arguments in WORLDS.items()}

        def steps(world: World) -> Callable[[], dict[str, float]]:
            return lambda: {form: world.seconds(form) for form in ("transformers", "patched")}

        times = interleaved_medians({name: steps(world) for name, world in worlds.items()}, rounds)
        for world in worlds.values():
            world.close()
    rows = []
    for name, (size, _) in WORLDS.items():
        both = {form: times[name, form] for form in ("transformers", "patched")}
        rates = {f"{form}_tokens_per_second": 1 / seconds for form, seconds in both.items()}
        rows.append({"world": name, **taken(both, *both, unit="ms"), **rates, "threads": THREADS // size})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "patched-ranks.csv", rounds=7, quick="a small model and one round")
    parser.add_argument("--shape", choices=("8B", "1.1B", "160M"), default="160M", help="default: 160M")
    options = parser.parse_args(argv)
    shape, rounds = ("small", 1) if options.quick else (options.shape, options.rounds)
    harness.run(options, [({"shape": shape}, partial(measure, shape, rounds))])


if __name__ == "__main__":
    main()
