"""Fuzzes the C ABI: descriptors and arguments of every op out of random bytes, on memory between forbidden pages.

    python tests/fuzz/infiniop.py --seconds 600         # or: make fuzz

hypothesis draws the bytes, which change a described sample (dtypes, shapes, strides, parameters, NULLs, the values in
memory). A call may be refused or may succeed; what it may not do is crash, hang, or touch memory that it was not given:
every tensor ends (or begins) at a page that cannot be accessed. Each batch is a separate process, so that a crash
leaves the call that caused it.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from torch_infini.compat.libinfiniop import InfiniDtype, to_torch_dtype
from torch_infini.testing import threads_set_to
from torch_infini.testing.c_ops import DTYPES, CError, COp, CSample, Described, Descriptor, c_function
from torch_infini.testing.ops import all_c_ops

# Bytes of an element; torch has no C16, two bytes of float8.
SIZES = {int(dt): 2 if dt == InfiniDtype.C16 else to_torch_dtype(dt).itemsize for dt in InfiniDtype if dt}
MOST_BYTES = 1 << 22  # of one tensor: larger ones are created, but not run
MOST_WORK = 1 << 20  # elements of one tensor that are visited, repeated ones included
EXTREMES = (0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 257, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guarded:
    """`size` bytes that touch a page without access: at their end, or at their beginning."""

    def __init__(self, size: int, at_end: bool) -> None:
        page = mmap.PAGESIZE
        self.length = (size + page - 1) // page * page + 2 * page
        self.base = _libc.mmap(None, self.length, mmap.PROT_READ | mmap.PROT_WRITE, 0x22, -1, 0)  # private, anonymous
        assert self.base not in (None, ctypes.c_void_p(-1).value), "no memory for a guarded buffer"
        _libc.mprotect(self.base, page, 0)
        _libc.mprotect(self.base + self.length - page, page, 0)
        self.address = self.base + self.length - page - size if at_end else self.base + page

    def fill(self, content: bytes) -> None:
        ctypes.memmove(self.address, content, len(content))

    def free(self) -> None:
        _libc.munmap(self.base, self.length)


class Bytes:
    """Choices out of a string of random bytes; zeros when it is used up."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def below(self, n: int) -> int:
        chunk = self.data[self.at : self.at + 2]
        self.at += 2
        return int.from_bytes(chunk, "little") % n

    def choose(self, options: Any) -> Any:
        return options[self.below(len(options))]


class Shape:
    """A tensor argument while it is being changed."""

    def __init__(self, tensor: Tensor | Described) -> None:
        described = isinstance(tensor, Described)
        own = tensor.dtype if described and tensor.dtype is not None else None
        self.dtype = own if own is not None else DTYPES[tensor.base.dtype if described else tensor.dtype]
        self.shape = list(tensor.shape)
        self.strides = list(tensor.strides if described else tensor.stride())
        self.original = (tuple(self.shape), tuple(self.strides), self.dtype)
        self.tensor = None if described else tensor

    def change(self, draw: Bytes) -> None:
        what = draw.below(6)
        if what == 0:
            self.dtype = draw.choose(list(SIZES)) if draw.below(8) else draw.choose([0, 20, -1, 255])
        elif what == 1 and self.shape:
            dim = draw.below(len(self.shape))
            self.shape[dim] = draw.choose(EXTREMES[:15]) if draw.below(4) else draw.choose(EXTREMES)
        elif what == 2 and self.strides:
            dim = draw.below(len(self.strides))
            self.strides[dim] = draw.choose(EXTREMES) * draw.choose((1, 1, -1))
        elif what == 3:
            dim = draw.below(len(self.shape) + 1)
            self.shape.insert(dim, draw.choose((1, 1, 2, 3)))
            self.strides.insert(dim, draw.choose((0, 1, 5)))
        elif what == 4 and self.shape:
            dim = draw.below(len(self.shape))
            del self.shape[dim], self.strides[dim]
        elif self.shape:  # contiguous again
            step = 1
            for dim in reversed(range(len(self.shape))):
                self.strides[dim] = step
                step *= max(self.shape[dim], 1)

    def extent(self) -> tuple[int, int]:
        """Bytes before and from the element with all indices 0."""
        size = SIZES.get(self.dtype, 1)
        if 0 in self.shape:
            return 0, 0
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        return -sum(r for r in reach if r < 0) * size, (sum(r for r in reach if r > 0) + 1) * size

    def work(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    def described(self) -> Described:
        return Described(torch.empty(0), tuple(self.shape), tuple(self.strides), 0, self.dtype)


class Raw:
    """Stands for memory at an address, where a sample has a tensor."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer


def attempt(op: COp, sample: CSample, draw: Bytes) -> str:
    """One call, changed by the bytes; how it ended."""
    args: dict[str, Any] = dict(sample.args)
    shapes: dict[int, Shape] = {}
    described = {a.name.removesuffix("_desc") for a in op.create.arguments if a.type == "infiniopTensorDescriptor_t"}
    for key, value in args.items():
        if isinstance(value, Tensor | Described) and key in described and id(value) not in shapes:
            shapes[id(value)] = Shape(value)
    states = list(shapes.values())
    for _ in range(draw.below(5)):
        if states and draw.below(3):
            draw.choose(states).change(draw)
            continue
        key = draw.choose(list(args))
        value = args[key]
        if isinstance(value, bool | int):
            args[key] = draw.choose(EXTREMES) * draw.choose((1, -1))
        elif isinstance(value, float):
            args[key] = draw.choose((0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, float("inf"), float("nan"), -1e30))
        elif isinstance(value, list | tuple):
            args[key] = [draw.choose(EXTREMES) * draw.choose((1, 1, -1)) for _ in range(8)]
        elif draw.below(4) == 0:
            args[key] = None
    create_args = {
        key: shapes[id(v)].described() if isinstance(v, Tensor | Described) and id(v) in shapes else v
        for key, v in args.items()
    }
    try:
        descriptor = Descriptor(op, create_args)
    except CError as error:
        return error.status
    buffers: dict[int, Guarded] = {}
    try:
        with descriptor:
            if any(sum(s.extent()) > MOST_BYTES or s.work() > MOST_WORK for s in states):
                return "not run: large"
            needs = op.undescribed(create_args) if op.undescribed is not None else {}
            run_args: dict[str, Any] = {}
            for key, value in args.items():
                if not isinstance(value, Tensor | Described):
                    run_args[key] = value
                    continue
                if id(value) not in buffers:
                    before, after = shapes[id(value)].extent() if id(value) in shapes else (0, needs.get(key, 0))
                    if before + after > MOST_BYTES:
                        return "not run: large"
                    buffer = buffers[id(value)] = Guarded(before + after, at_end=draw.below(2) == 0)
                    state = shapes.get(id(value))
                    kept = state is not None and state.tensor is not None and draw.below(8)
                    if kept and (tuple(state.shape), tuple(state.strides), state.dtype) == state.original:
                        # The sample's own values: positions, tables and lengths that make sense.
                        ctypes.memmove(buffer.address, state.tensor.data_ptr(), before + after)
                    else:
                        buffer.fill(random.Random(draw.below(1 << 16)).randbytes(before + after))
                    buffer.origin = buffer.address + before  # type: ignore[attr-defined]
                run_args[key] = Raw(buffers[id(value)].origin)  # type: ignore[attr-defined]
            size = descriptor.workspace_size()
            if size > MOST_BYTES * 16:
                return "not run: large"
            workspace = buffers[-1] = Guarded(size, at_end=True)
            workspace.address -= workspace.address % 64
            run(descriptor, run_args, workspace.address if size else None, size)
            return "SUCCESS"
    except CError as error:
        return error.status
    finally:
        for buffer in buffers.values():
            buffer.free()


def run(descriptor: Descriptor, args: dict[str, Any], workspace: int | None, size: int) -> None:
    """The op on raw addresses."""
    types = {"int": ctypes.c_int, "size_t": ctypes.c_size_t, "float": ctypes.c_float}
    fixed = {"desc": descriptor.handle, "workspace": workspace, "workspace_size": ctypes.c_size_t(size), "stream": None}
    values = []
    for argument in descriptor.op.run.arguments:
        value = fixed[argument.name] if argument.name in fixed else args[argument.name]
        if isinstance(value, Raw):
            value = value.pointer
        if argument.name not in fixed:
            value = ctypes.c_void_p(value) if argument.type.endswith("*") else types[argument.type](value)
        elif argument.name in ("workspace", "stream"):
            value = ctypes.c_void_p(value)
        values.append(value)
    c_function(descriptor.op.run.name)(*values)


def small_samples(op: COp) -> list[CSample]:
    elements = lambda s: sum(v.numel() for v in s.args.values() if isinstance(v, Tensor))
    return [sample for sample in op.samples() if elements(sample) < 1 << 16]


def fuzz(op: COp, examples: int, number: int, journal: Path) -> Counter[str]:
    """`examples` calls; the one that is being made stands in the journal."""
    outcomes: Counter[str] = Counter()
    samples = small_samples(op)

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=64, max_size=64))
    def one(data: bytes) -> None:
        journal.write_text(f"{op.name} {data.hex()}\n")
        draw = Bytes(data)
        outcomes[attempt(op, draw.choose(samples), draw)] += 1

    one()
    return outcomes


def replay(line: str) -> str:
    """The call that a journal names, once more."""
    name, data = line.split()
    op = next(op for op in all_c_ops() if op.name == name)
    draw = Bytes(bytes.fromhex(data))
    return attempt(op, draw.choose(small_samples(op)), draw)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="how long to go on (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=300, help="calls an op and batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch (default: %(default)s)")
    parser.add_argument("--op", help="only this op, as in infiniopCreate<OP>Descriptor")
    parser.add_argument("--replay", metavar="LINE", help="make the call of a crash's journal again")
    parser.add_argument("--batch", metavar="JOURNAL", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay:
        torch.manual_seed(0)
        print(replay(arguments.replay))
        return 0
    if arguments.batch:
        ops = [op for op in all_c_ops() if arguments.op in (None, op.name)]
        outcomes: Counter[str] = Counter()
        with threads_set_to(2):
            for op in ops:
                torch.manual_seed(0)  # samples are random too, and a replay has to make the same
                outcomes += fuzz(op, arguments.examples, arguments.seed, arguments.batch)
        print(" ".join(f"{name.replace(' ', '_')}={count}" for name, count in outcomes.items()))
        return 0
    total: Counter[str] = Counter()
    start, batch = time.monotonic(), 0
    journal = Path(os.environ.get("TMPDIR", "/tmp")) / f"infiniop-fuzz-{os.getpid()}"
    while time.monotonic() - start < arguments.seconds:
        options = [
            "--batch",
            str(journal),
            "--seed",
            str(arguments.seed + batch),
            "--examples",
            str(arguments.examples),
        ]
        options += ["--op", arguments.op] if arguments.op else []
        done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-4000:])
            print(f"the process ended with {done.returncode} in this call:\n  --replay '{journal.read_text().strip()}'")
            return 1
        total.update({name: int(count) for name, count in (pair.split("=") for pair in done.stdout.split())})
        batch += 1
    journal.unlink(missing_ok=True)
    seconds = time.monotonic() - start
    print(f"{sum(total.values())} calls in {seconds:.0f} s, {batch} batches, no crash:")
    for name, count in total.most_common():
        print(f"  {count:9} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
