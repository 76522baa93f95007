"""tune: times this machine's dense products, ours and ATen's, and prints from how many rows on ATen's is faster.

The rows of conv are its output channels.

The two are timed in turns. ATen is chosen only from a size on at which, and above which, it is always faster; ties go
to our kernel, whose results do not depend on the number of rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from .._core import products
from .._core.library import emulates_cuda
from .._core.products import PRODUCTS, Product
from .errors import CommandError

HELP = "measure which dense products ATen computes faster on this machine, and store it"

ROWS = (1, 4, 16, 64, 256, 1024)
SIZES = (2048, 2816)  # k and n: half a feed-forward layer of a 1.1B model
BATCH = (32, 64)  # products of rows x 64 by 64 x rows: the scores of 32 heads
# Image, kernel size and stride: a layer of a ResNet; the patches of a vision transformer.
IMAGES: dict[Product, tuple[tuple[int, int, int], int, int]] = {
    "conv": ((64, 58, 58), 3, 1),
    "patches": ((3, 336, 336), 14, 14),
}
MARGIN = 1.03  # how much faster ATen must be; smaller differences are noise
HOPELESS = 8  # larger sizes are not measured where ATen takes so many times as long at two sizes in a row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", action="store_true", help="use the result here from now on")
    parser.add_argument("--file", type=Path, help="where to store it (default: the user's cache folder)")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="medians of so many (default: %(default)s)")


def calls(product: Product, rows: int, dtype: torch.dtype) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that compute the product by our op and by torch's."""
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int, scale: float = 1) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    ops = torch.ops.infini
    if product in IMAGES:
        (channels, height, width), size, stride = IMAGES[product]
        image, kernels = random(1, channels, height, width), random(rows, channels, size, size, scale=1 / size)
        return (
            lambda: ops.conv.default(image, kernels, None, [stride]),
            lambda: torch.conv2d(image, kernels, None, stride),
        )
    if product == "batched":
        batch, k = BATCH
        a, b = random(batch, rows, k), random(batch, k, rows, scale=k**-0.5)
        return lambda: ops.matmul.default(a, b), lambda: torch.matmul(a, b)
    k, n = SIZES
    x, weight = random(rows, k), random(n, k, scale=k**-0.5)
    if product == "linear":
        return lambda: ops.linear.default(x, weight), lambda: torch.nn.functional.linear(x, weight)
    matrix = weight.t().contiguous()
    return lambda: ops.matmul.default(x, matrix), lambda: torch.matmul(x, matrix)


def measure(product: Product, dtype: torch.dtype, rows: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of a product by our kernel and by ATen, with the current number of threads."""
    from ..testing.benchmark import medians

    ours, aten = calls(product, rows, dtype)
    with products.aten_from_set_to(None), torch.no_grad():
        times = medians({"infini": ours, "aten": aten}, rounds, 0.01)
    return {
        "product": product,
        "dtype": str(dtype).removeprefix("torch."),
        "rows": rows,
        "infini_us": 1e6 * times["infini"],
        "aten_us": 1e6 * times["aten"],
    }


def aten_from(lines: list[dict[str, Any]]) -> int | None:
    """Return the least number of rows from which on ATen is faster, given measurements sorted by rows; None: never."""
    least = None
    for line in reversed(lines):
        if line["infini_us"] < MARGIN * line["aten_us"]:
            break
        least = line["rows"]
    return least


def is_hopeless(lines: list[dict[str, Any]]) -> bool:
    """Whether ATen need not be measured at larger sizes: matmul of bfloat16 took 5 s on a Zen 3, ours 0.04."""
    return len(lines) > 1 and all(line["aten_us"] > HOPELESS * line["infini_us"] for line in lines[-2:])


def numbers(name: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise CommandError(f"--{name} must be positive integers with commas between, got {text!r}")
    return sorted(values)


def dtypes_of(text: str) -> Iterator[torch.dtype]:
    for name in text.split(","):
        dtype = getattr(torch, name, None)
        if dtype not in products.DTYPES:
            raise CommandError(f"--dtypes must be of float32, bfloat16 and float16, got {name!r}")
        yield dtype


def run(arguments: argparse.Namespace) -> int:
    from ..testing import threads_set_to

    rows, dtypes = numbers("rows", arguments.rows), list(dtypes_of(arguments.dtypes))
    for name in ("threads", "rounds"):
        if getattr(arguments, name) < 1:
            raise CommandError(f"--{name} must be at least 1, got {getattr(arguments, name)}")
    if emulates_cuda():
        raise CommandError("tune measures the CPU's kernels, and these libraries run CUDA's on it")
    of = products.machine()
    print(f"{of['cpu']}, {of['capability']}, torch {of['torch']}, {arguments.threads} thread(s)")
    print(f"{'product':8} {'dtype':9} {'rows':>5} {'infini us':>10} {'ATen us':>10} {'ATen / infini':>13}")
    measured: list[dict[str, Any]] = []
    table: dict[tuple[Product, torch.dtype], int | None] = {}
    with threads_set_to(arguments.threads):
        for product in PRODUCTS:
            for dtype in dtypes:
                lines = []
                for count in rows:
                    line = measure(product, dtype, count, arguments.rounds)
                    lines.append(line)
                    print(
                        f"{product:8} {line['dtype']:9} {count:5} {line['infini_us']:10.1f} {line['aten_us']:10.1f} "
                        f"{line['aten_us'] / line['infini_us']:13.2f}",
                        flush=True,
                    )
                    if is_hopeless(lines) and count != rows[-1]:
                        print(f"{product:8} {line['dtype']:9} {'more':>5} is not measured: ATen takes too long")
                        break
                measured += lines
                table[product, dtype] = aten_from(lines)
    for (product, dtype), size in table.items():
        name = str(dtype).removeprefix("torch.")
        print(f"{product} of {name}: {'ours' if size is None else f'ATen from {size} rows on'}")
    if arguments.store or arguments.file:
        file = arguments.file or products.default_file()
        try:
            products.write(file, table, [{**line, "threads": arguments.threads} for line in measured])
        except OSError as error:
            raise CommandError(f"the table cannot be stored in {file} ({error}); --file names another place") from error
        print(
            f"stored in {file}" + (": set INFINI_PRODUCTS to it" if arguments.file else ", used from the next start on")
        )
    else:
        print("not stored: --store does that")
    return 0
