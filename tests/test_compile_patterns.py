"""The patterns of backend="infini" are found by their files: adding one edits no other file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_infini import compile as infini_compile
from torch_infini.compile import patterns

ADDED = """
import torch

from torch_infini.compile.graph import argument, insert, is_
from torch_infini.compile.patterns import Pattern


def apply(graph, report, wanted):
    for node in list(graph.nodes):
        inner = argument(node, 0) if is_(node, "square") else None
        if is_(inner, "neg") and report.record("square_of_negative", None, wanted):
            with graph.inserting_before(node):
                result = insert(graph, torch.square, (inner.args[0],), like=node)
            node.replace_all_uses_with(result)
            graph.erase_node(node)


PATTERN = Pattern(("square_of_negative",), apply, order=ORDER)
"""


def test_order() -> None:
    """Norms are found before additions are replaced, and attention reads the replaced rotary embeddings."""
    names = [pattern.names[0] for pattern in patterns.PATTERNS]
    assert names == ["rms_norm", "rope", "attention", "swiglu", "linear"]
    assert infini_compile.PATTERN_NAMES == (
        "rms_norm", "add_rms_norm", "rope", "attention", "swiglu", "geglu", "linear",
    )  # fmt: skip


@pytest.mark.parametrize(("order", "place"), [(-1, 0), (2, 3), (9, 5)])
def test_a_file_adds_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int, place: int) -> None:
    name = f"of_order_{order}".replace("-", "minus_")
    (tmp_path / f"{name}.py").write_text(ADDED.replace("ORDER", str(order)))
    (tmp_path / "_helper.py").write_text("raise AssertionError('not a pattern')")
    monkeypatch.setattr(patterns, "__path__", [*patterns.__path__, str(tmp_path)])
    found = patterns.find_patterns()
    assert [pattern.names[0] for pattern in found].index("square_of_negative") == place
    assert [pattern for pattern in found if pattern is not found[place]] == list(patterns.PATTERNS)

    monkeypatch.setattr(infini_compile, "PATTERNS", found)
    monkeypatch.setattr(infini_compile, "PATTERN_NAMES", (*infini_compile.PATTERN_NAMES, "square_of_negative"))
    reports = []

    def backend(graph_module: torch.fx.GraphModule, example_inputs: list[Tensor]) -> object:
        reports.append(infini_compile.replace_patterns(graph_module, "square_of_negative"))
        assert all(node.target is not torch.neg for node in graph_module.graph.nodes if node.users)
        return graph_module.forward

    torch._dynamo.reset()
    x = torch.tensor([2.0, -3.0])
    assert torch.compile(lambda x: torch.square(torch.neg(x)), backend=backend)(x).tolist() == [4.0, 9.0]
    assert dict(reports[0].replaced) == {"square_of_negative": 1}
