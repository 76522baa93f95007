"""All-reduce between processes of this machine, by size: ours beside torch.distributed's Gloo; writes CSV and a plot.

    python benchmarks/collectives.py

Ours is dist.all_reduce in a group of backend infiniccl (`torch`), the same call asynchronously and waited for
(`async`), torch.ops.infini.all_reduce_ (`op`), and libinfiniccl's C function through ctypes (`infini`). In every round
each contestant takes its turn at every size, on all ranks at once, in place; rank 0's clock counts: the median over the
rounds of the mean of some calls. `ratio_to_gloo` and `share_of_copy` are those of dist.all_reduce: Gloo's time, and the
time in which libc's memcpy copies as many bytes, on all ranks at once, over its own.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plot_collectives import write

from torch_infini.distributed import communicator as number_of
from torch_infini.libinfiniccl import DTYPES, Communicator, ReduceOp, unique_id
from torch_infini.testing.benchmark import count, counts, results_of, seconds, write_csv

RESULTS = results_of(__file__)
KIB, MIB = 1 << 10, 1 << 20
SIZES = [8, 64, 512, *(n * KIB for n in (2, 8, 16, 32, 64, 128, 256, 512)), *(n * MIB for n in (1, 4, 16, 32, 64))]
QUICK = [8, 8 * KIB, MIB]


@dataclass
class Row:
    """One line of the CSV; times of one call in microseconds."""

    bytes: int
    dtype: str
    ranks: int
    torch_us: float
    async_us: float
    op_us: float
    infini_us: float
    gloo_us: float
    ratio_to_gloo: float
    copy_us: float
    share_of_copy: float


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
        results.put({key: 1e6 * statistics.median(values) for key, values in times.items()})
    communicator.all_reduce(0, 0, 0, code, ReduceOp.MAX)
    dist.destroy_process_group()


def measure(plan: Plan) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=work, args=(rank, plan, results)) for rank in range(plan.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank failed; its message is above")
    us = results.get()
    dtype = str(plan.dtype).removeprefix("torch.")
    return [
        Row(
            size,
            dtype,
            plan.ranks,
            us[size, "torch"],
            us[size, "async"],
            us[size, "op"],
            us[size, "infini"],
            us[size, "gloo"],
            us[size, "gloo"] / us[size, "torch"],
            us[size, "copy"],
            us[size, "copy"] / us[size, "torch"],
        )
        for size in plan.sizes
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "collectives.csv")
    parser.add_argument("--ranks", type=counts, default=[2], help="with commas between (default: 2)")
    parser.add_argument("--rounds", type=count, default=15)
    parser.add_argument("--threads", type=count, default=1, help="of each rank")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="three sizes, two rounds")
    options = parser.parse_args(argv)
    rows = []
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
            rows += measure(plan)
    write_csv(options.out, rows, Row)
    for row in rows:
        print(
            f"{row.ranks} ranks, {row.bytes:9} bytes: {row.torch_us:9.1f} us, Gloo {row.gloo_us:9.1f} us "
            f"({row.ratio_to_gloo:.1f}x), {row.share_of_copy:.2f} of copying; op {row.op_us:.1f} us, C "
            f"{row.infini_us:.1f} us"
        )
    print(f"{len(rows)} rows in {options.out}, drawn in {write(options.out)}")


if __name__ == "__main__":
    main()
