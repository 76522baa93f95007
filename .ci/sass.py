"""Reads machine code as cuobjdump prints it, and counts the instructions of kernels and of their main loops.

    python .ci/sass.py csrc/infiniop/attention/attention_bfloat16.cu 'attend.*128'

compiles a source for one architecture (an object or a cubin is taken as it is) and prints a line for each kernel whose
name matches. docs/gpu.md shows such figures; .ci/check_cuda.py asks the rest of what is here.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Opcodes that leave the straight line. A call comes back behind itself; what it calls lies in the same function.
JUMPS = {"BRA", "JMP"}
ENDS = {"EXIT", "RET", "BRX", "JMX", "BRXU", "JMXU", "KILL"}
UNKNOWN_TARGETS = {"BRX", "JMX", "BRXU", "JMXU"}


@dataclass(frozen=True)
class Instruction:
    """One line of a dump: `/*0120*/ @!P0 BRA 0x90 ;`."""

    address: int
    opcode: str  # with its modifiers: LDG.E.128
    operands: str = ""
    guard: str = ""  # @P0

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> int | None:
        """The address that it names, where that is the last operand."""
        match = re.search(r"(?:^|[\s,])(0x[0-9a-f]+)$", self.operands)
        return int(match[1], 16) if match else None

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow."""
        if self.base in JUMPS:
            return bool(self.guard) or not re.fullmatch(r"0x[0-9a-f]+", self.operands)  # BRA.DIV UR4, 0x90
        return bool(self.guard) or self.base not in ENDS


@dataclass
class Function:
    """A kernel's instructions in the order of their addresses."""

    symbol: str
    code: list[Instruction]
    registers: int = 0
    _at: dict[int, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._at = {instruction.address: i for i, instruction in enumerate(self.code)}

    def successors(self, i: int, calls: bool = False) -> list[int]:
        """The positions that may follow position i; with `calls` also what it calls."""
        instruction = self.code[i]
        targets = [instruction.target] if instruction.base in JUMPS or (calls and instruction.base == "CALL") else []
        found = [self._at[target] for target in targets if target in self._at]
        return found + ([i + 1] if instruction.goes_on and i + 1 < len(self.code) else [])

    def reached_without(self, opcode: str) -> list[Instruction]:
        """The instructions that some path from the kernel's start reaches without passing one of `opcode`."""
        seen, waiting = set(), [0] if self.code else []
        while waiting:
            i = waiting.pop()
            if i not in seen and self.code[i].base != opcode:
                seen.add(i)
                waiting += self.successors(i, calls=True)
        return [self.code[i] for i in sorted(seen)]

    @cached_property
    def main_loop(self) -> list[Instruction]:
        """The largest loop, with everything that comes back to its start, wherever it lies; [] without a loop."""
        loops = natural_loops([self.successors(i) for i in range(len(self.code))]) if self.code else {}
        return [self.code[i] for i in sorted(max(loops.values(), key=len, default=()))]


def natural_loops(successors: list[list[int]]) -> dict[int, set[int]]:
    """The loops of a graph entered at 0, by their heads: those of one head are one.

    A jump to a smaller address is not always a loop: rare code lies behind everything else and jumps back. So a loop is
    a jump to a node that every path to the jump has passed (its dominator), and all that reaches the jump from there.
    """
    order: list[int] = []  # depth first, each node after its successors
    seen, stack = {0}, [(0, iter(successors[0]))]
    while stack:
        node, others = stack[-1]
        following = next((other for other in others if other not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(successors[following])))
    number = {node: i for i, node in enumerate(order)}
    before: dict[int, list[int]] = {node: [] for node in order}
    for node in order:
        for other in successors[node]:
            before[other].append(node)

    above = {0: 0}  # each node's nearest dominator
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            a, *rest = (other for other in before[node] if other in above)
            for b in rest:
                while a != b:
                    if number[a] < number[b]:
                        a = above[a]
                    else:
                        b = above[b]
            if above.get(node) != a:
                above[node], changed = a, True

    def dominates(head: int, node: int) -> bool:
        while node != head and node != 0:
            node = above[node]
        return node == head

    loops: dict[int, set[int]] = {}
    for node in order:
        for head in successors[node]:
            if dominates(head, node):
                loop = loops.setdefault(head, {head})
                waiting = [node]
                while waiting:
                    inner = waiting.pop()
                    if inner not in loop:
                        loop.add(inner)
                        waiting += before[inner]
    return loops


LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")


def parse(dump: str) -> list[Function]:
    """The functions in what `cuobjdump --dump-sass` printed."""
    functions = []
    for part in re.split(r"\n\s*Function : ", dump)[1:]:
        symbol, _, body = part.partition("\n")
        code = [
            Instruction(int(address, 16), opcode, operands, (guard or "").strip())
            for address, guard, opcode, operands in LINE.findall(body)
        ]
        while code and code[-1].opcode == "NOP":  # fills the last line of the instruction cache
            code.pop()
        if code and code[-1].base == "BRA" and code[-1].target == code[-1].address:  # the trap behind the end
            code.pop()
        functions.append(Function(symbol.strip(), code))
    return functions


def read_registers(usage: str) -> dict[str, int]:
    """Registers by symbol, in what `cuobjdump --dump-resource-usage` printed."""
    return {symbol: int(count) for symbol, count in re.findall(r"Function (\w+):\s+REG:(\d+)", usage)}


def count(code: Iterable[Instruction], opcode: str) -> int:
    return sum(instruction.base == opcode for instruction in code)


def tools() -> dict[str, str]:
    """The environment in which cuobjdump and nvdisasm are found: on PATH or as packages of this Python."""
    folders = [str(folder) for folder in Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin")]
    return {**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", ""), *folders])}


def find_cuobjdump() -> str | None:
    return shutil.which("cuobjdump", path=tools()["PATH"])


def dump(binary: Path, *what: str) -> str:
    """What cuobjdump prints of an object or a cubin."""
    command = [find_cuobjdump() or "cuobjdump", *what, str(binary)]
    return subprocess.run(command, env=tools(), capture_output=True, text=True, check=True).stdout


def functions_of(binary: Path) -> list[Function]:
    functions = parse(dump(binary, "--dump-sass"))
    registers = read_registers(dump(binary, "--dump-resource-usage"))
    for function in functions:
        function.registers = registers.get(function.symbol, 0)
    return functions


def demangled(symbols: Collection[str]) -> dict[str, str]:
    """Names as in the source, without parameters; the symbols themselves where there is no c++filt."""
    if not shutil.which("c++filt"):
        return {symbol: symbol for symbol in symbols}
    said = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True).stdout
    names = (re.sub(r"\(anonymous namespace\)::|infini::|^void ", "", name) for name in said.splitlines())
    return dict(zip(symbols, map(without_parameters, names)))


def without_parameters(name: str) -> str:
    depth = 0
    for i in range(len(name) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(name[i], 0)
        if depth == 0:
            return name[:i] if name.endswith(")") else name
    return name


COUNTED = ("HMMA", "IMMA", "LDGSTS", "CALL")


def report(functions: Iterable[Function], pattern: str) -> list[str]:
    """A line for each function with the pattern in its name, mangled or not; counts are "in the loop/in all"."""
    functions = list(functions)
    names = demangled([function.symbol for function in functions])
    lines = []
    for function in functions:
        name, loop = names[function.symbol], function.main_loop
        if not re.search(pattern, name) and not re.search(pattern, function.symbol):
            continue
        counts = "".join(f"{count(loop, opcode):>8}/{count(function.code, opcode):<4}" for opcode in COUNTED)
        unknown = ", jumps to unknown addresses" if any(i.base in UNKNOWN_TARGETS for i in function.code) else ""
        lines.append(f"{function.registers:>9} {len(function.code):>7} {len(loop):>6}{counts}  {name}{unknown}")
    head = f"{'registers':>9} {'all':>7} {'loop':>6}" + "".join(f"{opcode:>8}{'':5}" for opcode in COUNTED)
    return [head.rstrip(), *sorted(lines, key=lambda line: line.split("  ")[-1])] if lines else []


def compiled(source: Path, arch: str, folder: Path) -> Path:
    """The cubin of a source, with the build's flags."""
    setup = runpy.run_path(str(ROOT / "build_rules.py"), run_name="sass")
    build = ROOT / "build" / "native"
    build.mkdir(parents=True, exist_ok=True)
    made = folder / f"{source.stem}.cubin"
    command = ["nvcc", *setup["cuda_flags"]([arch]).split(), "-cubin", str(source.resolve()), "-o", str(made)]
    subprocess.run(command, cwd=build, check=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("source", type=Path, help="a *.cu file, an object or a cubin")
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression for kernels' names")
    parser.add_argument("--arch", default="9.0", help="as in TORCH_CUDA_ARCH_LIST (9.0)")
    arguments = parser.parse_args()
    if find_cuobjdump() is None:
        sys.exit("sass: no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, or make check-cuda once")
    with tempfile.TemporaryDirectory() as folder:
        source = arguments.source
        binary = compiled(source, arguments.arch, Path(folder)) if source.suffix == ".cu" else source
        lines = report(functions_of(binary), arguments.pattern)
    print(*lines or [f"sass: no kernel of {source} has {arguments.pattern!r} in its name"], sep="\n")
    return int(not lines)


if __name__ == "__main__":
    sys.exit(main())
