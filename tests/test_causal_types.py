"""Every causal type of transformers, every one with images and every encoder: none is patched or served wrong.

docs/families.csv, docs/image-families.csv and docs/encoder-families.csv are what runs give.
"""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torch_infini.patch import load_model, patch_model
from torch_infini.patch.swap import Patched
from torch_infini.testing.causal_types import build, causal_types
from torch_infini.testing.encoder_types import encoder_types
from torch_infini.testing.image_types import image_types

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parent.parent
# A fused layer, experts, keys wider than values, with images, no rotation, sinks, states of two kinds, an encoder, two
# rotations, a cache of transformers' own.
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
    "mpt",
)
# Types whose small models fail with a cache or in a step, patched or not.
WITHOUT_CACHE = ("blt", "cpmant", "hrm_text", "rwkv", "xlstm")
# Patched classes that call the original forward by design; what they replace is within it.
BY_ORIGINAL = {"Model", "DecoderModel", "RotaryEmbedding", "InterfaceAttention", "MethodAttention"}


def rows_of(name: str) -> dict[str, dict[str, str]]:
    """The rows of a table in docs by type."""
    with (ROOT / "docs" / name).open(newline="", encoding="utf-8") as file:
        return {row["type"]: row for row in csv.DictReader(file)}


ROWS, IMAGE_ROWS, ENCODER_ROWS = map(rows_of, ("families.csv", "image-families.csv", "encoder-families.csv"))


@pytest.fixture(scope="module")
def every_type() -> Iterator[Any]:
    """The script that makes the table."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("every_type")
    sys.path.remove(str(ROOT / "benchmarks"))


def agree(row: Any, table: Mapping[str, Mapping[str, str]] = ROWS) -> None:
    """The committed row says what was found, but for numbers that depend on the CPU."""
    committed = table[row.type]
    names = ("patched", "modules", "engine", "folder", "ranks")
    assert tuple(getattr(row, name) for name in names) == tuple(committed[name] for name in names)


@pytest.mark.parametrize("kind", SAMPLE)
def test_sample(kind: str, every_type: Any) -> None:
    row = every_type.examine_quietly(kind)
    assert (row.patched, row.engine) not in (("failed", ""), ("partly", "differs"))
    agree(row)


@pytest.mark.full
def test_every_fourth(every_type: Any) -> None:
    """A run over all of them takes two minutes of two cores: python benchmarks/every_type.py."""
    found = list(every_type.examine_all([kind for kind in causal_types() if kind in ROWS][::4]))
    assert not [row for row in found if row.patched == "failed" or "differs" in (row.engine, row.folder, row.ranks)]
    for row in found:
        agree(row)


def test_the_table_has_every_type() -> None:
    """Of the release that it was made with; and as many as were promised are served."""
    table = ROWS
    assert set(table) <= set(causal_types())
    if transformers.__version__.startswith("5.24."):
        assert sorted(table) == causal_types()
    engine = [row["engine"] for row in table.values()]
    assert engine.count("served") + engine.count("recorded") >= 158 and engine.count("refused") <= 5
    assert sum(row["ranks"] == "shared" for row in table.values()) >= 154
    assert sum(row["patched"] == "fully" for row in table.values()) >= 166
    assert not [row for row in table.values() if row["patched"] == "failed" or "differs" in row.values()]
    assert [row["type"] for row in table.values() if row["folder"] != row["engine"]] == []


@pytest.mark.parametrize("kind", ["diffllama", "xlnet"])
def test_every_parameter_is_read(kind: str, tmp_path: Path) -> None:
    """Also those that a model makes by torch.normal or as nn.Parameter(torch.FloatTensor), on no default device."""
    model = build(kind)
    model.save_pretrained(tmp_path)
    found = dict(load_model(tmp_path).named_parameters())
    assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "minimax_m3_vl", "paligemma"])
def test_image_sample(kind: str, every_type: Any) -> None:
    agree(every_type.examine_quietly(kind), IMAGE_ROWS)


@pytest.mark.full
def test_every_fourth_with_images(every_type: Any) -> None:
    found = list(every_type.examine_all([*IMAGE_ROWS][::4]))
    assert not [row for row in found if row.patched == "failed" or "differs" in (row.engine, row.folder, row.ranks)]
    for row in found:
        agree(row, IMAGE_ROWS)


@pytest.mark.parametrize("kind", ["jina_embeddings_v3", "modernvbert", "bart"])
def test_encoder_sample(kind: str, every_type: Any) -> None:
    agree(every_type.examine_quietly(kind, every_type.examine_encoder), ENCODER_ROWS)


@pytest.mark.full
def test_every_fourth_encoder(every_type: Any) -> None:
    found = list(every_type.examine_all([*ENCODER_ROWS][::4], examine=every_type.examine_encoder))
    assert not [row for row in found if row.patched == "failed" or "differs" in (row.engine, row.folder)]
    for row in found:
        agree(row, ENCODER_ROWS)


def test_the_table_of_encoders_has_every_type() -> None:
    if transformers.__version__.startswith("5.24."):
        assert sorted(ENCODER_ROWS) == encoder_types()
    assert [row["engine"] for row in ENCODER_ROWS.values()].count("served") >= 46
    assert not [row for row in ENCODER_ROWS.values() if row["patched"] == "failed" or "differs" in row.values()]


def test_the_table_of_images_has_every_type() -> None:
    if transformers.__version__.startswith("5.24."):
        assert sorted(IMAGE_ROWS) == image_types()
    engine = [row["engine"] for row in IMAGE_ROWS.values()]
    assert engine.count("served") + engine.count("recorded") >= 52
    assert not [row for row in IMAGE_ROWS.values() if row["patched"] == "failed" or "differs" in row.values()]


def test_a_type_that_is_none(every_type: Any) -> None:
    row = every_type.examine_quietly("no_type")
    assert (row.patched, row.engine, row.reasons) == ("not built", "", "'no_type'")


def fallbacks(kind: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The patched classes whose modules run the original forward in an ordinary call with a cache, and in a step."""
    model = build(kind)
    patch_model(model)
    found: set[str] = set()

    def note(original: type[nn.Module]) -> None:
        forward = original.forward

        def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, Patched):
                found.add(replacement_of(self))
            return forward(self, *args, **kwargs)

        monkeypatch.setattr(original, "forward", noting)

    for original in {module.infini_original for module in model.modules() if isinstance(module, Patched)}:
        note(original)
    ids = torch.arange(5, 14)[None]
    with torch.no_grad():
        cached = kind not in WITHOUT_CACHE
        cache = getattr(model(input_ids=ids, use_cache=cached), "past_key_values", None)
        if cached and cache is not None:
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    return found - BY_ORIGINAL


def replacement_of(module: Patched) -> str:
    """The name of the class of ours that is mixed into a module's class."""
    return next(one.__name__ for one in type(module).__bases__ if issubclass(one, Patched))


# First those whose models hand arguments of their own down to attention.
QUICK = ("qwen3_moe", "got_ocr2", "gpt_oss", "gemma3n", "cohere2", "olmo2", "phi")
PATCHED = [kind for kind in sorted(ROWS) if ROWS[kind]["patched"] in ("fully", "partly") and kind not in QUICK]


@pytest.mark.full(beyond=len(QUICK))
@pytest.mark.parametrize("kind", (*QUICK, *PATCHED))
def test_nothing_falls_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is replaced computes in an ordinary call; otherwise the report would not be true."""
    assert fallbacks(kind, monkeypatch) == set()
