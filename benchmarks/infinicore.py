"""InfiniCore's front ends: what a call costs above the op that it calls, and replays of a recorded decode layer.

C++ (benchmarks/infinicore_calls.cpp, compiled here): op::rms_norm_ above infiniopRMSNorm, allocation, replay above the
plain calls. Python: infinicore's ops above torch.ops.infini on the same memory, and a recorded decode layer above
torch_infini.runtime.program of the same ops. Times are medians over interleaved rounds.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import harness
import torch
from harness import HERE, Cases, Row

import torch_infini
import torch_infini.compat.infinicore as ic
from torch_infini._core.library import ROOT
from torch_infini.testing.benchmark import medians

HIDDEN, INTERMEDIATE = 2048, 5632  # of the 1.1B shape


def cpp(rounds: int) -> list[Row]:
    """The C++ program's lines: (what, what it is compared with, us of both)."""
    lib = ROOT / "lib"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "calls"
        source = HERE / "infinicore_calls.cpp"
        flags = ["-std=c++17", "-O2", f"-I{ROOT / 'include'}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
        libraries = ["-linfinicore_cpp_api", "-linfiniop", "-linfinirt"]
        subprocess.run(["g++", *flags, str(source), "-o", str(program), *libraries], check=True)
        lines = subprocess.run([str(program), str(rounds)], check=True, capture_output=True, text=True).stdout
    found = {name: [float(time) / 1e3 for time in times] for name, *times in map(str.split, lines.splitlines())}
    kernel, written, made = found["rms_norm"]
    memory, tensor = found["allocate"]
    eager, replayed = found["eight_adds"]
    return [
        compared("op::rms_norm_, 1 x 2048", "infiniopRMSNorm", written, kernel),
        compared("op::rms_norm, 1 x 2048", "infiniopRMSNorm", made, kernel),
        {"case": "allocateMemory, 1 MiB", "us": memory},
        {"case": "Tensor::empty, 1 MiB", "us": tensor},
        compared("replay of 8 op::add_, 4 elements", "the calls", replayed, eager),
    ]


def compared(case: str, peer: str, us: float, peer_us: float) -> Row:
    return {"case": case, "peer": peer, "us": us, "peer_us": peer_us, "above_us": us - peer_us, "ratio": us / peer_us}


def timed(case: str, peer: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> Row:
    times = medians({"ours": ours, "peer": theirs}, rounds, 0.02)
    return compared(case, peer, times["ours"] * 1e6, times["peer"] * 1e6)


def calls(rounds: int) -> list[Row]:
    """Ops of Python on the same memory, with an output given."""
    x, other, weight = torch.randn(1, HIDDEN), torch.randn(1, HIDDEN), torch.randn(HIDDEN)
    out = torch.empty_like(x)
    a, b, w, c = (ic.from_torch(tensor) for tensor in (x, other, weight, out))
    ours, ops = ic.nn.functional, torch.ops.infini
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "add": (lambda: ic.add(a, b, out=c), lambda: ops.add(x, other, out=out)),
        "silu": (lambda: ours.silu(a, out=c), lambda: ops.silu(x, out=out)),
        "swiglu": (lambda: ours.swiglu(a, b, out=c), lambda: ops.swiglu(other, x, out=out)),
        "rms_norm": (
            lambda: ours.rms_norm(a, [HIDDEN], w, 1e-5, out=c),
            lambda: ops.rms_norm(x, weight, 1e-5, out=out),
        ),
    }
    return [
        timed(f"{name}, 1 x {HIDDEN}", f"torch.ops.infini.{name}", mine, theirs, rounds)
        for name, (mine, theirs) in pairs.items()
    ]


def layer(rounds: int) -> list[Row]:
    """The norms and products of a decode layer with one token, recorded by both."""
    x, norm = torch.randn(1, HIDDEN), torch.ones(HIDDEN)
    q, up, gate, down = (
        torch.randn(rows, columns) / columns**0.5
        for rows, columns in (
            (HIDDEN, HIDDEN),
            (INTERMEDIATE, HIDDEN),
            (INTERMEDIATE, HIDDEN),
            (HIDDEN, INTERMEDIATE),
        )
    )
    ops, F = torch.ops.infini, ic.nn.functional

    def decode() -> torch.Tensor:
        h = ops.linear(ops.rms_norm(x, norm, 1e-5), q, None)
        y, residual = ops.add_rms_norm(x, h, norm, 1e-5)
        return ops.add(ops.linear(ops.swiglu(ops.linear(y, gate, None), ops.linear(y, up, None)), down, None), residual)

    program = torch_infini.runtime.program(decode)
    core = {name: ic.from_torch(value) for name, value in locals().items() if isinstance(value, torch.Tensor)}
    with ic.graph() as graph:
        h = F.linear(F.rms_norm(core["x"], [HIDDEN], core["norm"], 1e-5), core["q"])
        y, residual = ic.add_rms_norm(core["x"], h, core["norm"], 1e-5)
        result = ic.add(
            F.linear(F.swiglu(F.linear(y, core["up"]), F.linear(y, core["gate"])), core["down"]),
            residual,
        )
    graph.run()
    torch.testing.assert_close(torch.from_dlpack(result), decode(), rtol=0, atol=0)
    return [timed("replay of a decode layer of 1.1B", "runtime.program", graph.run, program.replay, rounds)]


def cases(rounds: int) -> Cases:
    for name, part in {"C++": cpp, "Python": calls, "graph": layer}.items():
        yield {"part": name}, partial(part, rounds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "infinicore.csv", rounds=21)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    harness.run(options, cases(options.rounds))


if __name__ == "__main__":
    main()
