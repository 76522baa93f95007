"""Names of the last release: each still works for one, and warns with the new name at the caller's line."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_python import run_python

import torch_infini
from torch_infini._deprecated import moved_names
from torch_infini.distributed import TPGroup
from torch_infini.models import Llama, LlamaConfig
from torch_infini.nn import Embedding, RMSNorm
from torch_infini.patch.apply import State
from torch_infini.patch.quantized_linear import FUSED, FusedLinear, QuantizedLinear, WeightPlan
from torch_infini.testing.checkpoints import SMALL
from torch_infini.testing.tiny_llama import tiny

ROOT = Path(__file__).resolve().parent.parent
ALONE = TPGroup(0, 1, 0)
SMALL_LLAMA = LlamaConfig.from_dict({**SMALL, "model_type": "llama", "num_hidden_layers": 1})


def rule(old: str, new: str) -> str:
    return f"{old} is deprecated and will be removed in the next release, use {new}$"


@pytest.mark.parametrize(
    "name, make",
    [
        ("torch_infini.nn.RMSNorm", lambda **group: RMSNorm(4, **group)),
        ("torch_infini.nn.Embedding", lambda **group: Embedding(5, 4, **group)),
        ("torch_infini.models.Llama", lambda **group: Llama(SMALL_LLAMA, **group)),
    ],
)
def test_ranks_of_modules(name: str, make: Callable[..., Any]) -> None:
    with pytest.warns(DeprecationWarning, match=rule(f"{name}: ranks", "tp_group")) as warned:
        module = make(ranks=ALONE)
    with pytest.warns(DeprecationWarning, match=rule(f"{name}: ranks", "tp_group")) as read:
        assert module.ranks is ALONE
    assert module.tp_group is ALONE
    assert {warning.filename for warning in (*warned, *read)} == {__file__}
    with pytest.raises(TypeError, match=f"{name}: ranks must be left out where tp_group is given, got both"):
        make(ranks=ALONE, tp_group=None)


def test_ranks_of_from_pretrained(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    where = "torch_infini.models.Llama.from_pretrained: ranks"
    with pytest.warns(DeprecationWarning, match=rule(where, "tp_group")) as warned:
        model = Llama.from_pretrained(tmp_path, ranks=None)  # type: ignore[call-arg]
    assert model.tp_group is None and warned[0].filename == __file__


@pytest.mark.parametrize("name", ["Cost", "ErrorCase", "Sample"])
def test_what_proves_an_op(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rule(f"torch_infini.ops.{name}", f"torch_infini.testing.ops.{name}")):
        assert getattr(torch_infini.ops, name) is getattr(importlib.import_module("torch_infini.testing.ops"), name)


def test_asking_imports_testing_and_importing_does_not() -> None:
    code = """
import sys, torch_infini
assert not [name for name in sys.modules if name.startswith("torch_infini.testing")]
assert not hasattr(torch_infini.ops, "Specimen")
assert not [name for name in sys.modules if name.startswith("torch_infini.testing")]
torch_infini.ops.Sample
assert "torch_infini.testing.ops" in sys.modules
"""
    run_python(code, check=True)


def test_other_names_are_attribute_errors() -> None:
    get = moved_names("torch_infini.old", Here="torch_infini.distributed.TPGroup")
    with pytest.raises(AttributeError, match=r"module 'torch_infini\.old' has no attribute 'There'"):
        get("There")
    with pytest.raises(AttributeError, match=r"module 'torch_infini\.ops' has no attribute 'Specimen'"):
        torch_infini.ops.Specimen  # noqa: B018


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_pickled_quantized_model(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was pickled whole names classes, and has attributes, of the module patch.quantised."""
    model = tiny()
    torch_infini.patch_model(model, weights=weights)
    ids = torch.arange(5)[None]
    with torch.no_grad():
        before = model(ids).logits
    monkeypatch.setattr(State, "__getstate__", renamed(vars, "quantized", "quantised"), raising=False)
    kept = renamed(QuantizedLinear.__getstate__, FUSED, "_infini_joint")
    monkeypatch.setattr(QuantizedLinear, "__getstate__", kept)
    data = io.BytesIO()
    classes = named(QuantizedLinear, "QuantisedLinear"), named(FusedLinear, "Joint"), named(WeightPlan, "WeightPlan")
    with classes[0], classes[1], classes[2], pytest.warns(DeprecationWarning):  # pickle looks its names up
        torch.save(model, data)
    stored = data.getvalue()
    old, new = (b"QuantisedLinear", b"Joint", b"_infini_joint"), (b"QuantizedLinear", b"FusedLinear", FUSED.encode())
    assert all(name in stored for name in old) and not any(name in stored for name in new)
    data.seek(0)
    with pytest.warns(
        DeprecationWarning, match=r"quantised\.QuantisedLinear .*patch\.quantized_linear\.QuantizedLinear$"
    ):
        loaded = torch.load(data, weights_only=False)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, before)
    with pytest.raises(ValueError, match="layers with quantized weights"):
        torch_infini.unpatch_model(loaded)
    q = loaded.model.layers[0].self_attn.q_proj
    assert type(vars(q)[FUSED]) is FusedLinear and "_infini_joint" not in vars(q)


@contextmanager
def named(cls: type, name: str) -> Iterator[None]:
    """Run the body with a class of quantized_linear.py under its name in an earlier release."""
    before = cls.__module__, cls.__qualname__
    cls.__module__, cls.__qualname__ = "torch_infini.patch.quantised", name
    try:
        yield
    finally:
        cls.__module__, cls.__qualname__ = before


def renamed(state: Callable[[Any], dict[str, Any]], new: str, old: str) -> Callable[[Any], dict[str, Any]]:
    """Return `state` with an item under its old name, as an earlier release pickled it."""
    return lambda self: {old if name == new else name: value for name, value in state(self).items()}


def test_benchmarks_of_quantized_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    run = importlib.import_module("run")
    taken: list[list[str]] = []
    monkeypatch.setitem(run.INSTEAD, "--quantized", taken.append)
    run.main(["--quantized", "--quick"])
    with pytest.warns(DeprecationWarning, match=rule("--quantised", "--quantized")):
        run.main(["--quick", "--quantised"])
    assert taken == [["--quick"], ["--quick"]]
