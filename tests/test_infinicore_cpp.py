"""The C++ programs of tests/cpp on libinfinicore_cpp_api, on the CPU; tests/test_cuda_infinicore.py has the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cpp_programs import PROGRAMS, SOURCES, compiled, run


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, tmp_path: Path) -> None:
    run(compiled(SOURCES / f"{name}.cpp", tmp_path), "CPU", tmp_path)
