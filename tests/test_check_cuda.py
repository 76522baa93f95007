"""What .ci/check_cuda.py finds in machine code, on made-up dumps."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / ".ci"))
check_cuda: Any = importlib.import_module("check_cuda")
sass: Any = importlib.import_module("sass")
sys.path.remove(str(ROOT / ".ci"))

WAITS = "PREEXIT ; ACQBULK ; LDG.E.128 R4, desc[UR4][R2.64] ; STG.E.128 desc[UR4][R2.64], R4 ; EXIT"


def functions(*kernels: str) -> list[Any]:
    """One kernel of each text, its instructions parted by semicolons."""
    dump = ""
    for number, code in enumerate(kernels):
        lines = "".join(
            f"        /*{16 * i:04x}*/  {text.strip()} ;  /* 0x00 */\n" for i, text in enumerate(code.split(";"))
        )
        dump += f"\n\t\tFunction : _ZN6infini3abc{len(f'copy{number}')}copy{number}EPf\n{lines}"
    return sass.parse(dump)


def test_a_kernel_that_waits() -> None:
    assert check_cuda.early_accesses(functions(WAITS)) == []
    # Parameters, shared memory, prefetches to L2 and loops of these may come first.
    first = "LDC R1, c[0x0][0x28] ; STS [R2], R3 ; CCTL.E.PF2 [R4.64] ; @P0 BRA 0x10 ; "
    assert check_cuda.early_accesses(functions(first + WAITS)) == []


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("LDG.E R4, desc[UR4][R2.64] ; " + WAITS, "LDG.E at 0x0"),
        ("LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64] ; " + WAITS, "LDGSTS.E.BYPASS.128 at 0x0"),
        ("@!P0 EXIT ; " + WAITS, "EXIT at 0x0"),
        ("@P0 BRA 0x20 ; ACQBULK ; REDG.E.ADD.STRONG.GPU desc[UR4][R2.64], R5 ; EXIT", "REDG.E.ADD.STRONG.GPU at 0x20"),
        (
            "CALL.REL.NOINC 0x30 ; ACQBULK ; EXIT ; ATOMG.E.ADD R0, [R2.64], R3 ; RET.REL.NODEC R8 0x0",
            "ATOMG.E.ADD at 0x30",
        ),
        ("MOV R1, R2 ; EXIT", "EXIT at 0x10"),
    ],
)
def test_a_kernel_that_does_something_before_it_waits(code: str, wrong: str) -> None:
    rule = f"copy1 can reach {wrong} without grid_dependency_sync() before it"
    assert check_cuda.early_accesses(functions(WAITS, code)) == [rule]


def test_predicates_of_clamped_minima() -> None:
    good = "VIMNMX.RELU R4, R4, 0x8, PT ; VIMNMX R2, P0, P0, R4, R3, PT ; ISETP.GT.AND P1, PT, R4, 0x7, PT ; "
    assert check_cuda.wrong_predicates(functions(good + WAITS)) == []
    bad = "VIMNMX.RELU R17, P0, P0, R17, 0x8, PT ; VIADDMNMX.RELU R5, P3, P3, R4, R2, 0x8, PT ; "
    wrong = check_cuda.wrong_predicates(functions(good + bad + WAITS))
    assert [sentence.partition(":")[0] for sentence in wrong] == [
        "copy0 takes a predicate from VIMNMX.RELU at 0x30",
        "copy0 takes a predicate from VIADDMNMX.RELU at 0x40",
    ]


def test_promised_instructions(tmp_path: Path) -> None:
    source = tmp_path / "copy.cu"
    source.write_text("// SASS: copy0: LDG.E.128 STG.E.128 EX\n// SASS: copy1: LDG.E.128 STG.E\n// SASS: copy2: HMMA\n")
    found = functions(WAITS, "ACQBULK ; LDG.E.64 R4, [R2.64] ; STG.E.128 [R2.64], R4")
    assert check_cuda.missing_instructions(source, found) == [
        "copy0 has no EX in its SASS",
        "copy1 has no LDG.E.128 in its SASS",
        "copy2 has no HMMA in its SASS",
    ]


def test_sampled_archs(tmp_path: Path) -> None:
    """A sample has the architecture that is looked at and, over many texts and commits, each of the others or none."""
    seen = set()
    for i in range(60):
        source = tmp_path / f"{i}.cu"
        source.write_text(f"// {i}")
        archs = check_cuda.sampled_archs(source)
        assert archs == check_cuda.sampled_archs(source) and "9.0" in archs and len(archs) <= 2
        seen.add(tuple(archs))
    assert sorted(seen) == [("8.0", "9.0"), ("9.0",), ("9.0", "10.0")]


def test_a_sample_has_what_changed_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header's change counts for all that include it, through other headers too; without a history all are taken."""
    everything = sorted((ROOT / "csrc").rglob("*.cu"))
    header = ROOT / "csrc" / "infiniop" / "linear" / "weight_formats.cuh"
    monkeypatch.setattr(check_cuda, "commit", lambda: "1")
    monkeypatch.setattr(check_cuda, "changed_lately", lambda: {header})
    taken = check_cuda.sampled(everything)
    for name in ("int4.cu", "weight_stream.cu", "int8_gemm.cu"):
        assert any(source.name == name for source in taken), name
    assert len(taken) < len(everything)
    in_turn: set[Path] = set()
    monkeypatch.setattr(check_cuda, "changed_lately", set)
    for number in range(20):
        monkeypatch.setattr(check_cuda, "commit", lambda number=number: str(number))
        in_turn.update(check_cuda.sampled(everything))
    assert in_turn == set(everything)
    monkeypatch.setattr(check_cuda, "changed_lately", lambda: None)
    assert check_cuda.sampled(everything) == everything
