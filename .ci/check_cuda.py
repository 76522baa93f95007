"""Compiles every CUDA source with nvcc alone, for sm_80, sm_90 and sm_100 with the build's flags, and reads the code.

    python .ci/check_cuda.py [--sample]

--sample compiles the sources that the last commits changed, by themselves or in a header, and a third of the others, by
the commit: all of them for sm_90, and about a quarter for one more.
The torch binding goes through the C++ compiler as for a torch with CUDA. Prints registers and shared memory of each
kernel, and fails on errors and warnings, and where a kernel spills registers. In the code for sm_90 it looks for the
instructions that a source promises of a kernel, in a line `// SASS: <kernel>: LDG.E.128`, and no kernel may reach
global memory, or its end, before it has waited for those ahead of it (csrc/common/cuda/launch.cuh).
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import sass
from stages import commit

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ["8.0", "9.0", "10.0"]
LOOKED_AT = "sm_90"
OTHERS = ["8.0", "10.0"]  # than the one that is looked at
LATELY = 30  # commits whose changes --sample looks at
SHARE = 3  # of the sources that they did not change, --sample compiles one in so many
INCLUDED_FROM = [ROOT / "csrc" / folder for folder in ("include", "common", "infiniop")]


def sampled_archs(source: Path) -> list[str]:
    """The architecture that is looked at, and one of the others or none, by the source's text and the commit."""
    number = zlib.crc32(source.read_bytes() + commit().encode()) % (4 * len(OTHERS))
    return sorted(["9.0", *OTHERS[number : number + 1]], key=float)


def changed_lately() -> set[Path] | None:
    """The files that the last commits changed; None where the history does not say."""
    command = ["git", "log", f"-{LATELY}", "--format=", "--name-only", "--", "csrc"]
    whole = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if whole.returncode or found.returncode or int(whole.stdout) <= LATELY:
        return None
    return {ROOT / name for name in found.stdout.splitlines()}


def files_of(source: Path) -> set[Path]:
    """A source and the headers of ours that it includes, directly or not, under any condition."""
    files, left = set(), [source]
    while left:
        file = left.pop()
        if file not in files:
            files.add(file)
            names = re.findall(r'^ *# *include "(.+?)"', file.read_text(), re.MULTILINE)
            found = (folder / name for name in names for folder in (file.parent, *INCLUDED_FROM))
            left.extend(path.resolve() for path in found if path.is_file())
    return files


def sampled(sources: list[Path]) -> list[Path]:
    """Those that changed lately, and some of the others."""
    changed = changed_lately()
    if changed is None:
        return sources
    in_turn = lambda source: zlib.crc32(f"{source.relative_to(ROOT)} {commit()}".encode()) % SHARE == 0  # noqa: E731
    return [source for source in sources if in_turn(source) or not changed.isdisjoint(files_of(source))]


@dataclass
class Kernel:
    """What ptxas says of one kernel (a template's instance) on one architecture."""

    symbol: str
    arch: str
    registers: int = 0
    shared: int = 0
    stack: int = 0
    spilled: int = 0

    @property
    def name(self) -> str:
        """The function's own name, of a mangled symbol: the last identifier that has a length before it."""
        position, name = 0, self.symbol
        while match := re.compile(r"\D*?(\d+)").match(self.symbol, position):
            length, start = int(match[1]), match.end()
            if (
                length == 0
                or start + length > len(self.symbol)
                or not self.symbol[start : start + length].isidentifier()
            ):
                break
            name, position = self.symbol[start : start + length], start + length
            if self.symbol[position : position + 1] not in "0123456789":
                break
        return name


def read_kernels(log: str) -> list[Kernel]:
    """The kernels in what `nvcc -Xptxas -v` printed."""
    kernels: list[Kernel] = []
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            kernels.append(Kernel(match[1], match[2]))
        elif kernels and (match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", line)):
            kernels[-1].stack = max(kernels[-1].stack, int(match[1]))
            kernels[-1].spilled += int(match[2]) + int(match[3])
        elif kernels and (match := re.search(r"Used (\d+) registers", line)):
            kernels[-1].registers = int(match[1])
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[-1].shared = int(shared[1]) if shared else 0
    return kernels


def span(values: set[int]) -> str:
    return f"{min(values)}" if len(values) == 1 else f"{min(values)}-{max(values)}"


def table(kernels: list[Kernel]) -> list[str]:
    """A line for each kernel and architecture, its instances together."""
    groups: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.name, kernel.arch), []).append(kernel)
    return [
        f"  {name:<28} {arch}  {len(group):>3} instances  {span({k.registers for k in group}):>7} registers  "
        f"{span({k.shared for k in group}):>11} B shared  {sum(k.spilled for k in group)} B spilled"
        for (name, arch), group in sorted(groups.items())
    ]


def missing_instructions(source: Path, functions: list[sass.Function]) -> list[str]:
    """Sentences about kernels that lack an instruction their source promises."""
    found: dict[str, set[str]] = {}
    for function in functions:
        found.setdefault(Kernel(function.symbol, "").name, set()).update(i.opcode for i in function.code)
    wanted = re.findall(r"^// SASS: (\w+): (.+)$", source.read_text(), re.MULTILINE)
    return [
        f"{name} has no {instruction} in its SASS"
        for name, instructions in wanted
        for instruction in instructions.split()
        if not any(f".{instruction}." in f".{opcode}." for opcode in found.get(name, ()))
    ]


# Loads, stores and atomics of memory that other grids see; LDC, LDS, LDL and their like are a kernel's own.
GLOBAL = re.compile(
    r"(LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|REDG|REDAS|UBLKCP|UBLKRED|UTMA\w+|SULD|SUST|SUATOM|SURED|TEX|TLD\d?)"
)


def early_accesses(functions: list[sass.Function]) -> list[str]:
    """Sentences about kernels that do something before their wait (ACQBULK) that must come after it."""
    wrong = []
    for function in functions:
        early = [i for i in function.reached_without("ACQBULK") if i.base == "EXIT" or GLOBAL.fullmatch(i.base)]
        if early:
            name, first = Kernel(function.symbol, "").name, early[0]
            wrong.append(
                f"{name} can reach {first.opcode} at {first.address:#x} without grid_dependency_sync() before it"
            )
    return wrong


# min and max of a count, clamped at 0, with a comparison of the result taken from the same instruction.
CLAMPED = re.compile(r"VI(ADD)?MNMX3?(\.\w+)*\.RELU(\.\w+)*")


def wrong_predicates(functions: list[sass.Function]) -> list[str]:
    """Sentences about kernels that take a predicate from a clamped minimum.

    An H100 sets it also where the clamp made the value 0; ptxas 13.0 takes it for "the value is the bound". Seen with
    `count = min(max(left, 0), width)` and a branch on `count == width`; a branch on `left >= width` has no such code.
    """
    return [
        f"{Kernel(function.symbol, '').name} takes a predicate from {i.opcode} at {i.address:#x}: compare the value "
        "before it is clamped (csrc/common/cuda/heads.cuh)"
        for function in functions
        for i in function.code
        if CLAMPED.fullmatch(i.opcode) and re.match(r"\w+, U?P\d", i.operands)
    ]


def check(source: Path, flags: str, folder: Path) -> tuple[list[str], list[str]]:
    """(lines for the table, what is wrong) of one source."""
    made = folder / (str(source.relative_to(ROOT)).replace(os.sep, ".") + ".o")
    command = ["nvcc", *flags.split(), "-Xptxas", "-v", "-c", str(source), "-o", str(made)]
    result = subprocess.run(command, cwd=ROOT / "build" / "native", capture_output=True, text=True)
    log = result.stderr
    if result.returncode or "warning" in log:
        return [], [line for line in log.splitlines() if "error" in line or "warning" in line] or [log]
    kernels = read_kernels(log)
    wrong = [f"{k.name} ({k.arch}) spills {k.spilled} bytes" for k in kernels if k.spilled]
    if sass.find_cuobjdump():
        functions = sass.parse(sass.dump(made, "--dump-sass", "--gpu-architecture", LOOKED_AT))
        wrong += missing_instructions(source, functions) + early_accesses(functions)
        wrong += wrong_predicates(functions)
    return table(kernels), wrong


def check_host_side(setup: dict) -> list[str]:
    """What the compiler says of the torch binding as a torch with CUDA declares its functions."""
    torch = setup["find_torch"]()
    if torch is None:
        return ["no torch to check the host side against"]
    flags = f"-std=c++17 -fsyntax-only -fvisibility=hidden -Wall -Wextra -Werror -DUSE_CUDA {setup['INCLUDE']}"
    flags += f" -DTORCH_TARGET_VERSION={setup['STABLE_ABI']}"
    command = [os.environ.get("CXX", "g++").split()[-1], *flags.split(), "-isystem", str(torch / "include")]
    source = ROOT / "csrc" / "torch" / "tensor_torch.cpp"
    result = subprocess.run([*command, str(source)], cwd=ROOT / "build" / "native", capture_output=True, text=True)
    return result.stderr.splitlines() if result.returncode else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", action="store_true", help="fewer sources, for one or two architectures each")
    sample = parser.parse_args().sample
    setup = runpy.run_path(str(ROOT / "build_rules.py"), run_name="check_cuda")
    sources: list[Path] = setup["cuda_sources"]()
    if not shutil.which("nvcc"):
        print(f"check_cuda: no nvcc on PATH: none of the {len(sources)} CUDA sources was compiled")
        return 0
    (ROOT / "build" / "native").mkdir(parents=True, exist_ok=True)
    all_sources, sources = sources, sampled(sources) if sample else sources
    flags = {source: setup["cuda_flags"](sampled_archs(source) if sample else ARCHS) for source in sources}
    host_side = check_host_side(setup)
    print("host side with -DUSE_CUDA:", "FAILED" if host_side else "passes", *host_side, sep="\n  ", flush=True)
    failed = bool(host_side)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        checks = pool.map(lambda source: check(source, flags[source], Path(folder)), sources)
        for source, (lines, wrong) in zip(sources, checks, strict=True):
            print(f"{source.relative_to(ROOT)}: {'FAILED' if wrong else 'compiles'}", *lines, sep="\n", flush=True)
            for sentence in wrong:
                print(f"  {sentence}")
            failed = failed or bool(wrong)
    looked = "" if sass.find_cuobjdump() else "; SASS not looked at: no cuobjdump"
    archs = "9.0, a quarter of them for one more" if sample else ", ".join(ARCHS)
    result = "FAILED" if failed else "passes"
    print(f"check_cuda: {len(sources)} of {len(all_sources)} sources for {archs}: {result}{looked}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
