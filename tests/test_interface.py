"""The public interface against its record, tests/interface.txt: nothing of it is removed or changed unseen."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def record() -> Any:
    spec = importlib.util.spec_from_file_location("ci_interface", ROOT / ".ci" / "interface.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_removed_or_changed_unseen(record: Any) -> None:
    """`python .ci/interface.py --check`, which also says what to do."""
    version, lines = record.read_record(record.RECORD)
    assert lines == sorted(set(lines)) and len(lines) > 800
    wrong = record.check((version, lines), record.interface(), record.version(), record.is_released(version))
    assert not wrong, wrong


OLD = [
    "c infinirt.h: infiniStatus_t infinirtFree(void *ptr)",
    "c infinirt.h: typedef enum { A = 0, B = 1 } kind_t",
    "op infini::relu(Tensor x, float a=0.0) -> Tensor",
    "python torch_infini.load(model, *, weights=None, progress=None)",
    "soname libinfinirt: libinfinirt.so",
]


@pytest.mark.parametrize(
    ("line", "now", "fits"),
    [
        (0, None, False),
        (0, "c infinirt.h: infiniStatus_t infinirtFree(void *ptr, int flags)", False),
        (1, "c infinirt.h: typedef enum { A = 0, B = 1, C = 2 } kind_t", True),
        (1, "c infinirt.h: typedef enum { A = 0, B = 2 } kind_t", False),
        (2, "op infini::relu(Tensor x, float a=0.0, float b=1.0) -> Tensor", True),
        (2, "op infini::relu(Tensor x, float b=0.0) -> Tensor", False),
        (2, "op infini::relu(Tensor x, float a=0.0) -> (Tensor, Tensor)", False),
        (3, "python torch_infini.load(model, kind='a, b', *, progress=None, weights=None, more=())", True),
        (3, "python torch_infini.load(model, kind, *, weights=None, progress=None)", False),
        (3, "python torch_infini.load(model, *, weights='int8', progress=None)", False),
        (3, "python torch_infini.load(model, *, weights=None)", False),
        (4, "soname libinfinirt: libinfinirt.so.1", False),
    ],
)
def test_changes_that_are_found(line: int, now: str | None, fits: bool, record: Any) -> None:
    """What breaks programs; arguments with defaults and constants may be added."""
    lines = [*OLD[:line], *([now] if now else []), *OLD[line + 1 :]]
    added = "python torch_infini.other()"
    assert bool(record.check(("0.1.0", OLD), [*lines, added], "0.1.1", True)) != fits
    if not fits:
        said = record.check(("0.1.0", OLD), lines, "0.1.1", True)
        assert OLD[line] in said and f"now: {now or 'removed'}" in said
        assert said.endswith("it needs a new minor version, got 0.1.1 (CONTRIBUTING.md)")
        assert "the new version 0.2.0 allows it" in record.check(("0.1.0", OLD), lines, "0.2.0", True)
        assert "0.1.0 is not released" in record.check(("0.1.0", OLD), lines, "0.1.0", False)
        assert "a new major version, got 1.3.0" in record.check(("1.2.0", OLD), lines, "1.3.0", True)


def test_declarations_of_a_header(record: Any) -> None:
    text = """/* A; b. */
#ifndef A_H
#define A_H \\
    1;
#ifdef __cplusplus
extern "C" {
#endif
typedef enum INFINI_ENUM_BASE { ONE = 1, /* one */ TWO = 2 } number_t;
struct Pair { int a; int b; };
INFINI_API infiniStatus_t f(int a,
                            void (*release)(void *data)); // g();
#ifdef __cplusplus
}
#endif
#endif
"""
    assert list(record.declarations(text)) == [
        "typedef enum { ONE = 1, TWO = 2 } number_t",
        "struct Pair { int a; int b; }",
        "infiniStatus_t f(int a, void (*release)(void *data))",
    ]
    assert record.name_of("c a.h: typedef int (*run_t)(void *)") == "c a.h run_t"
    assert record.name_of("c a.h: int run(void *)") == "c a.h run"


def test_released_versions(record: Any) -> None:
    assert not record.is_released("9.9.9")
    assert record.breaks("0.1.4", "0.2.0") and record.breaks("1.2.0", "2.0.0") and record.breaks("0.9.0", "1.0.0")
    assert not record.breaks("0.1.0", "0.1.1") and not record.breaks("1.2.0", "1.3.0")
