"""infinicore::nn from C++: tests/cpp/test_nn.cpp has the checks."""

from __future__ import annotations

from pathlib import Path

from cpp_programs import TESTS, compiled, run


def test_modules(tmp_path: Path) -> None:
    assert run(compiled(TESTS / "cpp" / "test_nn.cpp", tmp_path / "test_nn"), "cpu") == "0 failures\n"
