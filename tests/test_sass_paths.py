"""What .ci/sass_paths.py finds in machine code, on made-up dumps."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / ".ci"))
sass: Any = importlib.import_module("sass")
sass_paths: Any = importlib.import_module("sass_paths")
sass_cases: Any = importlib.import_module("sass_cases")
sys.path.remove(str(ROOT / ".ci"))


def function(*lines: str) -> Any:
    """A function of these instructions, 16 bytes each."""
    body = "\n".join(f"        /*{16 * i:04x}*/ {line} ;" for i, line in enumerate(lines))
    (found,) = sass.parse(f"\n\t\tFunction : f\n{body}\n")
    assert len(found.code) == len(lines)
    return found


def addresses(lines: tuple[str, ...], wanted: str, loop: bool = False) -> list[int]:
    """The positions of the instructions on the path, in its order."""
    paths = sass_paths.Paths(function(*lines), sass_cases.Case("", "", "", wanted, 1).wanted)
    return [i.address // 16 for i in (paths.shortest_step() if loop else paths.shortest())]


# Two vectors, each loaded as one or element by element, stored as one or not at all; P0 tells for both.
FAST_AND_SLOW = (
    "ISETP.EQ.AND P0, PT, R1, RZ, PT",
    "@!P0 LDG.E.128 R4, [R2]",
    "@!P0 BRA 0x60",
    "LDG.E.U16 R4, [R2]",
    "LDG.E.U16 R5, [R2+0x2]",
    "NOP",
    "@P0 BRA 0xa0",  # 6
    "LDG.E.128 R8, [R3]",
    "MUFU.EX2 R8, R8",
    "BRA 0xc0",
    "LDG.E.U16 R8, [R3]",  # 10
    "LDG.E.U16 R9, [R3+0x2]",
    "STG.E.128 [R6], R4",  # 12
    "EXIT",
)
FAST = [0, 1, 2, 6, 7, 8, 9, 12, 13]
SLOW = [0, 1, 2, 3, 4, 5, 6, 10, 11, 12, 13]


def test_the_path_that_executes_what_is_wanted() -> None:
    assert addresses(FAST_AND_SLOW, "LDG.E.128=2 STG.E.128=1") == FAST
    assert addresses(FAST_AND_SLOW, "LDG.E.U16=4") == SLOW  # with the load that its guard holds back
    assert addresses(FAST_AND_SLOW, "") == FAST  # the shortest of all
    # Not one vector as a whole and the other in elements: P0 is the same in both places.
    assert addresses(FAST_AND_SLOW, "LDG.E.128=1") == []
    assert addresses(FAST_AND_SLOW, "LDG.E.128=3") == []
    assert addresses(FAST_AND_SLOW, "LDG.E.64=1") == []


def test_a_predicate_that_is_written_may_have_changed() -> None:
    for write in ("PLOP3.LUT P1, P0, PT, PT, PT, PT, 0x0, 0x0", "R2P PR, R4, 0x7f", "IADD3 R4, P0, R4, R5, RZ"):
        assert addresses((*FAST_AND_SLOW[:5], write, *FAST_AND_SLOW[6:]), "LDG.E.128=1")
    for read in ("ISETP.EQ.OR P1, PT, R1, RZ, P0", "IADD3.X R4, R4, R5, RZ, P0, !PT", "SEL R4, R5, R6, P0"):
        assert addresses((*FAST_AND_SLOW[:5], read, *FAST_AND_SLOW[6:]), "LDG.E.128=1") == []


# A loop of 2 to 9 over vectors of the same kinds, with a smaller one in it; 12 to 13 is a function.
LOOP = (
    "S2R R1, SR_TID.X",
    "CALL.REL.NOINC 0xc0",
    "ISETP.GE.AND P0, PT, R1, 0x8, PT",
    "@P0 BRA 0x60",
    "LDG.E.U16 R4, [R2]",
    "@P2 BRA 0x40",
    "@!P0 BRA 0x80",  # 6
    "LDG.E.128 R4, [R2]",
    "IADD3 R1, P1, R1, 0x1, RZ",
    "@P1 BRA 0x20",
    "STG.E.128 [R6], R4",  # 10
    "EXIT",
    "MUFU.RCP R4, R4",
    "RET.REL.NODEC R8 0x0",
)


def test_a_step_of_a_loop() -> None:
    assert addresses(LOOP, "LDG.E.128=1", loop=True) == [2, 3, 6, 7, 8, 9]
    assert sorted(addresses(LOOP, "LDG.E.U16=1", loop=True)) == [4, 5]  # the smaller loop
    assert sorted(addresses(LOOP, "LDG.E.U16=1 IADD3=1", loop=True)) == [2, 3, 4, 5, 6, 8, 9]
    assert addresses(LOOP, "STG.E.128=1", loop=True) == []


def test_turns_and_calls() -> None:
    once = [0, 1, 12, 13, 2, 3, 6, 7, 8, 9, 10, 11]
    assert addresses(LOOP, "LDG.E.128=1 LDG.E.U16=0") == once
    assert addresses(LOOP, "LDG.E.128=3 LDG.E.U16=0") == [*once[:4], *[2, 3, 6, 7, 8, 9] * 3, 10, 11]
    assert addresses(LOOP, "MUFU=0") == []
    stays = (*LOOP[:8], "IADD3 R1, R1, 0x1, RZ", *LOOP[9:])  # P1 is not written: no way out, or no way back
    assert addresses(stays, "LDG.E.128=3 LDG.E.U16=0") == []


def test_a_jump_through_a_table() -> None:
    lines = (
        "BRX R2 -0x10",
        "FADD R4, R4, R5",
        "BRA 0x60",
        "FMUL R4, R4, R5",
        "FMUL R4, R4, R5",
        "BRA 0x60",
        "EXIT",
    )
    assert addresses(lines, "FMUL=2") == [0, 3, 4, 5, 6]
    assert addresses(lines, "FADD=1") == [0, 1, 2, 6]


def test_counts() -> None:
    case = sass_cases.Case("copy", "", "^f$", "LDG.E.128=2", 32)
    counted = sass_paths.count(case, [function(*FAST_AND_SLOW)])
    assert (len(counted.code), counted.of("ALU"), counted.of("XU")) == (9, 1, 1)
    # A warp of 9 instructions takes 9/4 clocks for 32 * 32 bytes; the MUFU takes two.
    clock = 4.8e12 / 132 / 1.755e9
    assert counted.issue_share == pytest.approx(32 * 32 / (9 / 4) / clock)
    assert counted.pipeline_share == pytest.approx(32 * 32 / 2 / clock)
    assert counted.row() == "| copy | 9 | 1 | 1 | 32 | 0.28 | 21.96 | 24.71 |"
    with pytest.raises(ValueError, match="copy: no path of"):
        sass_paths.count(sass_cases.Case("copy", "", "f", "LDG.E.128=1", 32), [function(*FAST_AND_SLOW)])
    with pytest.raises(ValueError, match="must be in the name of one kernel of a.cu, got none"):
        sass_paths.count(sass_cases.Case("copy", "a.cu", "g", "LDG.E.128=1", 32), [function(*FAST_AND_SLOW)])


def test_cases() -> None:
    names = [case.name for case in sass_cases.CASES]
    assert len(set(names)) == len(names)
    for case in sass_cases.CASES:
        assert (ROOT / "csrc" / "infiniop" / case.source).is_file(), case
        assert case.bytes > 0 and any(case.wanted.values()), case
