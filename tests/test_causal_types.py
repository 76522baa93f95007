"""Every causal type of transformers: none is patched or served wrong; docs/families.csv is what a run gives."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torch_infini.testing.causal_types import causal_types

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "families.csv"
# A fused layer, experts, keys wider than values, with images, no rotation, sinks, states, no interface, an encoder.
SAMPLE = (
    "helium",
    "olmoe",
    "deepseek_v2",
    "got_ocr2",
    "opt",
    "mimo_v2_flash",
    "qwen3_5_text",
    "jamba",
    "bert",
    "gemma4_text",
)


@pytest.fixture(scope="module")
def every_type() -> Iterator[Any]:
    """The script that makes the table."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("every_type")
    sys.path.remove(str(ROOT / "benchmarks"))


def rows() -> dict[str, dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {row["type"]: row for row in csv.DictReader(file)}


def agree(row: Any) -> None:
    """The committed row says what was found, but for numbers that depend on the CPU."""
    committed = rows()[row.type]
    assert (row.patched, row.modules, row.engine) == tuple(committed[name] for name in ("patched", "modules", "engine"))


@pytest.mark.parametrize("kind", SAMPLE)
def test_sample(kind: str, every_type: Any) -> None:
    row = every_type.examine_quietly(kind)
    assert (row.patched, row.engine) not in (("failed", ""), ("partly", "differs"))
    agree(row)


@pytest.mark.full
def test_every_fourth(every_type: Any) -> None:
    """A run over all of them takes two minutes of two cores: python benchmarks/every_type.py."""
    found = list(every_type.examine_all(causal_types()[::4]))
    assert not [row for row in found if row.patched == "failed" or row.engine == "differs"]
    for row in found:
        agree(row)


def test_the_table_has_every_type() -> None:
    """And as many as were promised are served."""
    table = rows()
    assert sorted(table) == causal_types()
    assert sum(row["engine"] in ("served", "recorded") for row in table.values()) >= 143
    assert sum(row["patched"] == "fully" for row in table.values()) >= 151
    assert not [row for row in table.values() if row["engine"] == "differs" or row["patched"] == "failed"]


def test_a_type_that_is_none(every_type: Any) -> None:
    row = every_type.examine_quietly("no_type")
    assert (row.patched, row.engine, row.reasons) == ("not built", "", "'no_type'")
