"""Patched models of every family under compilers: one graph of the whole model, compiled generation, strict export.

With the aot_eager backend, which traces and functionalises as Inductor does and generates no code: what breaks a graph
breaks it there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.tiny_llama import close
from torch_infini.patch import patch_model
from torch_infini.testing.patched_families import FAMILIES, VOCABULARY, Family, logits

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread", "no_graphs_left")

# One of each build. The others' graphs of static shapes are those of generation, prompt and step.
STATIC = ("Llama", "Qwen3", "Gemma3", "Mixtral")


def case(family: Family, *values: object) -> Any:
    """A parameter of a test; `make test` has one family of each build."""
    marks = () if family.name in STATIC else pytest.mark.full
    return pytest.param(family, *values, marks=marks, id="-".join((family.name, *map(str, values))))


EVERY = pytest.mark.parametrize("family", list(map(case, FAMILIES)))
LENGTHS = (6, 9, 20)  # around the sliding windows of 16


def tokens(length: int, batch: int = 2) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


def patched_model(family: Family) -> nn.Module:
    """One layer of each kind that the family has: what compiles once compiles again."""
    kinds = family.config.get("layer_types") or family.config.get("no_rope_layers") or [None]
    model = family.build(num_hidden_layers=2 if len(kinds) > 1 or "sliding_window_pattern" in family.config else 1)
    report = patch_model(model)
    assert report.replaced
    return model


@pytest.mark.full(beyond=4)
@pytest.mark.parametrize(
    ("family", "shapes"),
    [case(family, "dynamic") for family in FAMILIES]
    + [case(family, "static") for family in FAMILIES if family.name in STATIC],
)
def test_forward(family: Family, shapes: str) -> None:
    """One graph, for several lengths if shapes are dynamic; what eager gives."""
    model = patched_model(family)
    dynamic = shapes == "dynamic"
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in LENGTHS if dynamic else LENGTHS[-1:]:
        ids = tokens(length)
        close(logits(compiled, ids), logits(model, ids))


@pytest.mark.full(beyond=2)
@EVERY
def test_generate(family: Family) -> None:
    """generate over a compiled forward and a static cache gives the tokens of eager."""
    model, ids = patched_model(family), tokens(5)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **settings)
    model.forward = torch.compile(type(model).forward.__get__(model), fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(ids, cache_implementation="static", **settings), expected)


class Logits(nn.Module):
    """A model's logits alone, as exported programs return tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


@pytest.mark.full(beyond=2)
@EVERY
def test_strict_export(family: Family) -> None:
    """torch.export with strict=True, for any length."""
    model = patched_model(family)
    with torch.no_grad():
        program = torch.export.export(
            Logits(model),
            (tokens(8),),
            dynamic_shapes={"ids": {1: torch.export.Dim("length", min=2, max=64)}},
            strict=True,
        )
        for length in LENGTHS:
            close(program.module()(tokens(length)), logits(model, tokens(length)))
