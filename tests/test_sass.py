"""What .ci/sass.py reads out of machine code, on made-up dumps."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / ".ci"))
sass: Any = importlib.import_module("sass")
sys.path.remove(str(ROOT / ".ci"))

# A small loop, then the main loop of 0x40 to 0x90 whose rare code is at 0xc0, then a subroutine.
DUMP = """
Fatbin elf code:
================
arch = sm_90

	code for sm_90
		Function : _ZN6infini3abc4sumsIfEEvPKf
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   LDC R1, c[0x0][0x28] ;               /* 0x00000a00ff017b82 */
                                                                        /* 0x000fe40000000800 */
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;              /* 0x00000001ff047424 */
        /*0020*/               @P1 BRA 0x10 ;                           /* 0x0000000000047947 */
        /*0030*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64] ; /* 0x00 */
        /*0040*/                   HMMA.16816.F32 R4, R8, R12, R4 ;     /* 0x0000000c0804723c */
        /*0050*/               @P0 BRA 0xc0 ;                           /* 0x0000000000047947 */
        /*0060*/                   BRA.DIV UR4, 0xc0 ;                  /* 0x0000000000047947 */
        /*0070*/                   IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4 ; /* 0x0 */
        /*0080*/              @!P2 EXIT ;                               /* 0x000000000000894d */
        /*0090*/              @!UP0 UIADD3 UR4, UR4, 0x1, URZ ;         /* 0x00 */
        /*00a0*/              @!P1 BRA 0x40 ;                           /* 0x0000000000047947 */
        /*00b0*/                   EXIT ;                               /* 0x000000000000794d */
        /*00c0*/                   CALL.REL.NOINC 0xe0 ;                /* 0x0000000000047944 */
        /*00d0*/                   BRA 0x70 ;                           /* 0x0000000000047947 */
        /*00e0*/                   STG.E.128 desc[UR4][R4.64], R8 ;     /* 0x00 */
        /*00f0*/                   RET.REL.NODEC R8 0x0 ;               /* 0x00 */
        /*0100*/                   BRA 0x100;                           /* 0x00 */
        /*0110*/                   NOP;                                 /* 0x00 */
		..........

		Function : straight
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   ACQBULK ;                            /* 0x000000000000782e */
        /*0010*/                   LDG.E R2, desc[UR4][R2.64] ;         /* 0x00 */
        /*0020*/                   EXIT ;                               /* 0x00 */
"""
USAGE = """
Resource usage:
 Function _ZN6infini3abc4sumsIfEEvPKf:
  REG:40 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:552 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function straight:
  REG:8 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:552 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def functions() -> list[Any]:
    found = sass.parse(DUMP)
    registers = sass.read_registers(USAGE)
    for function in found:
        function.registers = registers[function.symbol]
    return found


def test_instructions() -> None:
    sums, straight = functions()
    assert [sums.symbol, straight.symbol] == ["_ZN6infini3abc4sumsIfEEvPKf", "straight"]
    assert len(sums.code) == 16 and sums.code[-1].opcode == "RET.REL.NODEC"  # neither the trap nor what fills up
    assert sums.code[2] == sass.Instruction(0x20, "BRA", "0x10", "@P1")
    assert sums.code[9] == sass.Instruction(0x90, "UIADD3", "UR4, UR4, 0x1, URZ", "@!UP0")
    assert sums.code[6].target == 0xC0 and sums.code[6].goes_on and not sums.code[13].goes_on
    assert straight.code[0] == sass.Instruction(0, "ACQBULK")


def test_the_main_loop_has_its_rare_code_and_nothing_else() -> None:
    sums, straight = functions()
    # The jump from 0xd0 back to 0x70 is not a separate loop, and the subroutine belongs to none.
    assert [i.address for i in sums.main_loop] == [*range(0x40, 0xB0, 0x10), 0xC0, 0xD0]
    assert straight.main_loop == []


def test_loops_in_loops() -> None:
    #     0 -> 1 -> 2 -> 3 -> 1, 2 -> 2, 3 -> 4, and 5, which nothing reaches
    loops = sass.natural_loops([[1], [2], [3, 2], [1, 4], [], [1]])
    assert {head: sorted(loop) for head, loop in loops.items()} == {1: [1, 2, 3], 2: [2]}
    # Two jumps to one head are one loop, and a ring with two entries is none.
    assert sass.natural_loops([[1], [2, 3], [1], [1, 4], []]) == {1: {1, 2, 3}}
    assert sass.natural_loops([[1, 2], [2], [1, 3], []]) == {}


def test_report() -> None:
    head, line = sass.report(functions(), "sums")
    assert head.split() == ["registers", "all", "loop", "HMMA", "IMMA", "LDGSTS", "CALL"]
    assert line.split() == ["40", "16", "9", "1/1", "1/1", "0/1", "1/1", "abc::sums<float>"]
    assert sass.report(functions(), "4sumsIfE")[1] == line  # the mangled name
    assert sass.report(functions(), "nothing") == []
    assert len(sass.report(functions(), "")) == 3


def test_names() -> None:
    assert sass.without_parameters("f<g(int), 3>(void (*)(int), long)") == "f<g(int), 3>"
    assert sass.without_parameters("_Z1fv") == "_Z1fv"


def test_reached_without() -> None:
    sums, straight = functions()
    assert straight.reached_without("ACQBULK") == []
    assert straight.reached_without("PREEXIT") == straight.code
    assert 0xE0 in [i.address for i in sums.reached_without("IMMA")]  # through the call
    assert 0x80 not in [i.address for i in sums.reached_without("IMMA")]
