"""Counts what a warp executes on a path through a kernel, and the share of the memory's bandwidth that it allows.

    python .ci/sass_paths.py                       # the cases of .ci/sass_cases.py, as docs/gpu.md has them
    python .ci/sass_paths.py rms_norm --listing    # those with "rms_norm" in their name, with the code of each path

A kernel has fast paths (aligned vectors of 16 bytes) beside slow ones, so its size does not tell what it executes. A
case names its path by what is executed on it: "LDG.E.128=4 STG.E.128=2 SHFL=5" is the shortest way from the kernel's
entry to its end with exactly so many of these instructions; of a loop, the shortest way from a head back to it. What a
branch found a predicate to be holds until the predicate is written. A path may still contradict itself by a condition
that is computed twice: the count is a lower bound, and exact if the case names all that its call has to do.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import sass
from sass_cases import CASES, Case

# An H200: bytes that its memory moves a clock and multiprocessor, and warp instructions that a multiprocessor issues.
BYTES_PER_CLOCK = 4.8e12 / (132 * 1.755e9)
ISSUED_PER_CLOCK = 4
LANES = 32

# Pipelines that take fewer instructions a clock than are issued: ALU (integers but for multiplications, logic,
# comparisons, packing of halves) has 64 lanes a multiprocessor, XU (special functions, other conversions) 16.
PIPELINES = {
    "ALU": (
        2.0,
        "BMSK F2FP FMNMX FSEL FSET FSETP I2FP IABS IADD3 IMNMX ISETP LEA LOP3 PLOP3 PRMT SEL SGXT SHF VIADD VIADDMNMX "
        "VIMNMX VOTE",
    ),
    "XU": (0.5, "BREV F2F F2I FLO FRND I2F MUFU POPC"),
}

PARTING = sass.JUMPS | sass.ENDS | {"CALL"}


@dataclass(frozen=True)
class State:
    """Where a path stands."""

    position: int  # of the next instruction
    found: tuple[int, ...]  # of each wanted opcode
    known: frozenset[str]  # what predicates are: P0, !P1
    returns: tuple[int, ...]  # where calls come back


def is_a(opcode: str, wanted: str) -> bool:
    """Whether LDG.E.128.CONSTANT is an LDG.E.128, say."""
    return f"{opcode}.".startswith(f"{wanted}.")


def negated(predicate: str) -> str:
    return predicate[1:] if predicate.startswith("!") else f"!{predicate}"


def written_predicates(instruction: sass.Instruction) -> frozenset[str]:
    """The predicates that an instruction writes: those before its sources, with at most one register among them."""
    if instruction.base == "R2P":
        return frozenset(f"P{i}" for i in range(7))
    operands = [operand.strip() for operand in instruction.operands.split(",")]
    if re.search(r"SETP|PLOP3", instruction.base):
        operands = operands[:2]
    elif not re.fullmatch(r"U?P\w", operands[0]):
        operands = operands[1:]
    return frozenset(itertools.takewhile(lambda operand: re.fullmatch(r"U?P\w", operand), operands))


class Paths:
    """The paths through one function with exactly so many of some instructions."""

    def __init__(self, function: sass.Function, wanted: dict[str, int]) -> None:
        self.code, self.at = function.code, {instruction.address: i for i, instruction in enumerate(function.code)}
        self.opcodes, self.goal = list(wanted), tuple(wanted.values())
        self.end = len(self.code)  # the position of what has left the kernel
        self.finds = [
            tuple(k for k, opcode in enumerate(self.opcodes) if is_a(instruction.opcode, opcode))
            for instruction in self.code
        ]
        jumps = [instruction for instruction in self.code if instruction.base in sass.JUMPS | {"CALL"}]
        targets = {self.at[jump.target] for jump in jumps if jump.target in self.at}
        # Where a jump through a table (BRX) may lead, which cuobjdump does not print: places behind it, before the next
        # such jump, to which nothing else leads.
        untargeted = [i for i in range(1, self.end) if not self.code[i - 1].goes_on and i not in targets]
        tables = [i for i in range(self.end) if self.code[i].base in sass.UNKNOWN_TARGETS]
        self.leads = [self._leads(i) for i in range(self.end)]
        for i, following in zip(tables, [*tables[1:], self.end], strict=False):
            self.leads[i] = [position for position in untargeted if i < position < following]
        self.returns = [i + 1 for i in range(self.end) if self.code[i].base == "CALL"]
        # From each position the next event, where paths part or meet or find something, and the predicates written
        # on the way to it.
        self.event = list(range(self.end + 1))
        self.written = [frozenset[str]()] * (self.end + 1)
        for i in range(self.end - 1, 0, -1):
            if not (i in targets or i in untargeted or self._matters(i)):
                self.event[i] = self.event[i + 1]
                self.written[i] = self.written[i + 1] | written_predicates(self.code[i])
        self.read = self._read_predicates()

    def _leads(self, i: int) -> list[int]:
        """Where instruction i leads if its guard is true; a call to its function, a return nowhere."""
        instruction = self.code[i]
        target = [self.at[instruction.target]] if instruction.target in self.at else []
        if instruction.base == "EXIT":
            return [self.end]
        if instruction.base in sass.JUMPS:
            always = instruction.operands == f"{instruction.target or 0:#x}"  # not so BRA.DIV UR4, 0x90
            return target if always else [*target, i + 1]
        return target if instruction.base == "CALL" else [] if instruction.base in sass.ENDS else [i + 1]

    def _matters(self, i: int) -> bool:
        return self.code[i].base in PARTING or bool(self.finds[i])

    def _read_predicates(self) -> list[frozenset[str]]:
        """For each position the predicates that may decide about a path there."""
        read = [frozenset[str]()] * (self.end + 1)
        changed = True
        while changed:
            changed = False
            for i in range(self.end - 1, -1, -1):
                guard = self.code[i].guard.lstrip("@!")
                after = frozenset[str]().union(*(read[position] for position in self._following_positions(i)))
                now = after if guard else after - written_predicates(self.code[i])
                now |= {guard} if guard and self._matters(i) else set()
                changed |= now != read[i]
                read[i] = now
        return read

    def _following_positions(self, i: int) -> list[int]:
        """All positions that may follow position i, a return to any call included."""
        positions = self.returns if self.code[i].base == "RET" else self.leads[i]
        return [*positions, i + 1] if self.code[i].guard else positions

    def _most(self, goal: int, inside: set[int]) -> list[tuple[int, ...]]:
        """How many of each wanted opcode may be found from each position to the goal, at most as many as are wanted."""
        none = (0,) * len(self.goal)
        most = [none] * (self.end + 1)
        changed = True
        while changed:
            changed = False
            for i in sorted(inside, reverse=True):
                after = [
                    most[p] if p != goal else none for p in self._following_positions(i) if p in inside or p == goal
                ]
                now = tuple(
                    min(wanted, (k in self.finds[i]) + max((found[k] for found in after), default=0))
                    for k, wanted in enumerate(self.goal)
                )
                changed |= now != most[i]
                most[i] = now
        return most

    def shortest(self) -> list[sass.Instruction]:
        """From the entry to the end; [] if there is none."""
        return self._search(0, self.end, set(range(self.end)))

    def shortest_step(self) -> list[sass.Instruction]:
        """From a loop's head back to it, without calls, the shortest of all loops; [] if there is none."""
        graph = []
        for i, instruction in enumerate(self.code):
            over = instruction.base == "CALL" or bool(instruction.guard)  # a call comes back behind itself
            graph.append((self.leads[i] if instruction.base != "CALL" else []) + [i + 1] * over)
        loops = sass.natural_loops([*graph, []])
        steps = [self._search(head, head, loop) for head, loop in loops.items()]
        return min(filter(None, steps), key=len, default=[])

    def _search(self, start: int, goal: int, inside: set[int]) -> list[sass.Instruction]:
        """The shortest path from start to goal, which may be the same place, by Dijkstra's algorithm."""
        most = self._most(goal, inside)
        if most[start] != self.goal:
            return []
        first = State(start, (0,) * len(self.goal), frozenset(), ())
        order = itertools.count()  # among equal costs; states have no order
        costs = {first: 0}
        before: dict[State, tuple[State, int]] = {}
        waiting = [(0, next(order), first)]
        while waiting:
            cost, _, state = heapq.heappop(waiting)
            if cost > costs[state]:
                continue
            if cost > 0 and state.position == goal:
                return self._trace(state, before)
            for following in self._following(state):
                i = following.position
                event = self.event[i]
                left = most[event] if event != goal else first.found
                if event not in inside and event != goal:
                    continue
                if any(n + m < g for n, m, g in zip(following.found, left, self.goal, strict=True)):
                    continue
                known = frozenset(
                    fact
                    for fact in following.known
                    if fact.lstrip("!") in self.read[event] and fact.lstrip("!") not in self.written[i]
                )
                reached = State(event, following.found, known, following.returns)
                total = cost + 1 + event - i
                if total < costs.get(reached, total + 1):
                    costs[reached] = total
                    before[reached] = (state, i)
                    heapq.heappush(waiting, (total, next(order), reached))
        return []

    def _trace(self, state: State, before: dict[State, tuple[State, int]]) -> list[sass.Instruction]:
        pieces = []
        while state in before:
            previous, i = before[state]
            pieces.append([self.code[previous.position], *self.code[i : state.position]])
            state = previous
        return [instruction for piece in reversed(pieces) for instruction in piece]

    def _following(self, state: State) -> Iterator[State]:
        """What may come after the instruction at state.position."""
        i, instruction = state.position, self.code[state.position]
        guard = instruction.guard.removeprefix("@")
        if guard and self._matters(i) and guard not in state.known:
            yield State(i + 1, state.found, state.known | {negated(guard)}, state.returns)
        if guard and negated(guard) in state.known:
            return
        found = tuple(n + (k in self.finds[i]) for k, n in enumerate(state.found))
        if any(n > most for n, most in zip(found, self.goal, strict=True)):
            return
        written = written_predicates(instruction)
        known = frozenset(k for k in state.known if k.lstrip("!") not in written)
        known |= {guard} if guard and self._matters(i) else set()
        if instruction.base == "CALL":
            for position in self.leads[i] if len(state.returns) < 4 else ():
                yield State(position, found, known, (*state.returns, i + 1))
        elif instruction.base == "RET":
            if state.returns:
                yield State(state.returns[-1], found, known, state.returns[:-1])
        else:
            for position in self.leads[i]:
                yield State(position, found, known, state.returns)


@dataclass(frozen=True)
class Count:
    """What was counted on the path of a case."""

    case: Case
    code: list[sass.Instruction]

    def of(self, pipeline: str) -> int:
        return sum(instruction.base in PIPELINES[pipeline][1].split() for instruction in self.code)

    def share(self, clocks: float) -> float:
        """The share of the memory's bandwidth that is left if a warp takes so many clocks of a multiprocessor."""
        return LANES * self.case.bytes / clocks / BYTES_PER_CLOCK

    @property
    def issue_share(self) -> float:
        return self.share(len(self.code) / ISSUED_PER_CLOCK)

    @property
    def pipeline_share(self) -> float:
        return min(self.share(self.of(name) / rate) for name, (rate, _) in PIPELINES.items() if self.of(name))

    def row(self) -> str:
        numbers = [
            f"{len(self.code):,}",
            *(f"{self.of(name)}" for name in PIPELINES),
            f"{self.case.bytes}",
            f"{len(self.code) / self.case.bytes:.2f}",
            f"{self.issue_share:.2f}",
            f"{self.pipeline_share:.2f}",
        ]
        return f"| {self.case.name} | {' | '.join(numbers)} |"


HEAD = ["path", "executed", "ALU", "XU", "bytes a thread", "a byte", "issue allows", "pipelines allow"]


def one_kernel(case: Case, functions: list[sass.Function]) -> sass.Function:
    names = sass.demangled([function.symbol for function in functions])
    matching = [function for function in functions if re.search(case.kernel, names[function.symbol])]
    if len(matching) != 1:
        found = ", ".join(names[function.symbol] for function in matching) or "none"
        raise ValueError(
            f"{case.name}: {case.kernel!r} must be in the name of one kernel of {case.source}, got {found}"
        )
    return matching[0]


def count(case: Case, functions: list[sass.Function]) -> Count:
    paths = Paths(one_kernel(case, functions), case.wanted)
    code = paths.shortest_step() if case.loop else paths.shortest()
    if not code:
        raise ValueError(f"{case.name}: no path of {case.kernel} executes {case.path}")
    return Count(case, code)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression for cases' names")
    parser.add_argument("--listing", action="store_true", help="print the instructions of each path")
    arguments = parser.parse_args()
    if sass.find_cuobjdump() is None:
        sys.exit("sass_paths: no cuobjdump: see .ci/sass.py")
    cases = [case for case in CASES if re.search(arguments.pattern, case.name)]
    if not cases:
        sys.exit(f"sass_paths: pattern must match the name of a case of .ci/sass_cases.py, got {arguments.pattern!r}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def functions_of(source: str) -> list[sass.Function]:
            made = Path(tempfile.mkdtemp(dir=folder))
            return sass.functions_of(sass.compiled(sass.ROOT / "csrc" / "infiniop" / source, "9.0", made))

        sources = list(dict.fromkeys(case.source for case in cases))
        functions = dict(zip(sources, pool.map(functions_of, sources), strict=True))
    print("| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD), sep="\n")
    for case in cases:
        counted = count(case, functions[case.source])
        print(counted.row())
        if arguments.listing:
            print(*(f"    {i.address:#06x} {i.guard} {i.opcode} {i.operands}" for i in counted.code), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
