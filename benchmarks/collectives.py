"""All-reduce between processes of this machine, by size, beside torch.distributed's Gloo: results/CPU/collectives.csv.

    python benchmarks/collectives.py

A plot stands beside the file. Ours is dist.all_reduce in a group of backend infiniccl (`torch`), the same call
asynchronously and waited for (`async`), torch.ops.infini.all_reduce_ (`op`), and libinfiniccl's C function through
ctypes (`infini`). In every round each contestant takes its turn at every size, on all ranks at once, in place; rank 0's
clock counts: the median over the rounds of the mean of some calls. `ratio_to_gloo` and `share_of_copy` are those of
dist.all_reduce: Gloo's time, and the time in which libc's memcpy copies as many bytes, on all ranks at once, over its
own.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import plot
import torch
import torch.distributed as dist
from harness import Cases, Row, counts, ratios, taken

from torch_infini.distributed import communicator as number_of
from torch_infini.distributed.libinfiniccl import DTYPES, Communicator, ReduceOp, unique_id
from torch_infini.testing.benchmark import seconds
from torch_infini.testing.processes import forking

KIB, MIB = 1 << 10, 1 << 20
SIZES = [8, 64, 512, *(n * KIB for n in (2, 8, 16, 32, 64, 128, 256, 512)), *(n * MIB for n in (1, 4, 16, 32, 64))]
QUICK = [8, 8 * KIB, MIB]


@dataclass(frozen=True)
class Plan:
    """What every rank measures, and where the ranks meet."""

    ranks: int
    sizes: Sequence[int]
    dtype: torch.dtype
    rounds: int
    threads: int
    unique: bytes
    store: str


def repeats(size: int) -> int:
    """Calls in a row: so many on all ranks, without asking, that they take some milliseconds."""
    return max(2, min(200, 8 * MIB // size))


def work(rank: int, plan: Plan, results: Any) -> None:
    torch.set_num_threads(plan.threads)
    communicator = Communicator(plan.ranks, plan.unique, rank)
    dist.init_process_group("infiniccl", init_method=f"file://{plan.store}", rank=rank, world_size=plan.ranks)
    gloo, number = dist.new_group(backend="gloo"), number_of()
    op = torch.ops.infini.all_reduce_.default
    code, most = DTYPES[plan.dtype], max(plan.sizes) // plan.dtype.itemsize
    x, y = torch.ones(most, dtype=plan.dtype), torch.zeros(most, dtype=plan.dtype)

    def contestants(size: int) -> dict[str, Callable[[], Any]]:
        elements, part, at = size // plan.dtype.itemsize, x[: size // plan.dtype.itemsize], x.data_ptr()
        return {
            "torch": lambda: dist.all_reduce(part, dist.ReduceOp.MAX),
            "async": lambda: dist.all_reduce(part, dist.ReduceOp.MAX, async_op=True).wait(),
            "op": lambda: op(part, number, ReduceOp.MAX),
            "infini": lambda: communicator.all_reduce(at, at, elements, code, ReduceOp.MAX),
            "gloo": lambda: dist.all_reduce(part, dist.ReduceOp.MAX, group=gloo),
            "copy": lambda: ctypes.memmove(y.data_ptr(), at, size),
        }

    times: dict[tuple[int, str], list[float]] = {}
    with torch.no_grad():  # or an op that writes looks at every call whether autograd follows
        for round_ in range(-1, plan.rounds):  # the first warms up
            for size in plan.sizes:
                for name, call in contestants(size).items():
                    call()  # for its data to be where its own calls leave it
                    communicator.all_reduce(0, 0, 0, code, ReduceOp.MAX)  # all begin at the same time
                    time = seconds(call, repeats(size))
                    if round_ >= 0:
                        times.setdefault((size, name), []).append(time)
    if rank == 0:
        medians: dict[int, dict[str, float]] = {}
        for (size, name), values in times.items():
            medians.setdefault(size, {})[name] = statistics.median(values)
        results.put(medians)
    communicator.all_reduce(0, 0, 0, code, ReduceOp.MAX)
    dist.destroy_process_group()


def measure(plan: Plan) -> list[Row]:
    context = forking()
    results = context.SimpleQueue()
    processes = [context.Process(target=work, args=(rank, plan, results)) for rank in range(plan.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed; its message is above")
    return [
        {
            "bytes": size,
            **taken(times, "torch", "async", "op", "infini", "gloo"),
            **ratios(times, "gloo", to="torch"),
            **taken(times, "copy"),
            "share_of_copy": times["copy"] / times["torch"],
        }
        for size, times in results.get().items()
    ]


def cases(options: argparse.Namespace) -> Cases:
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            plan = Plan(
                ranks=ranks,
                sizes=QUICK if options.quick else SIZES,
                dtype=getattr(torch, options.dtype),
                rounds=2 if options.quick else options.rounds,
                threads=options.threads,
                unique=unique_id(),
                store=f"{folder}/store",
            )
            yield {"dtype": options.dtype, "ranks": ranks, "threads": options.threads}, partial(measure, plan)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "collectives.csv", rounds=15, quick="three sizes, two rounds")
    parser.add_argument("--ranks", type=counts, default=[2], help="with commas between (default: 2)")
    parser.add_argument("--threads", type=harness.count, default=1, help="of each rank (default: 1)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args(argv)
    harness.run(options, cases(options))
    print(f"drawn in {plot.write(options.out)}")


if __name__ == "__main__":
    main()
