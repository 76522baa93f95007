"""What a recorded call of a function of torch gives is found once for all calls that are alike, and anew for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torch_infini.compat.infinicore as infinicore
from support.fresh_python import run_python
from torch_infini.runtime import _noting

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_noting, "_memo", {})


def ours(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return infinicore.from_torch(
        (torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 8).to(dtype)
    )


def recorded(call: Callable[[], Any]) -> tuple[Any, Any]:
    infinicore.start_graph_recording()
    try:
        result = call()
    finally:
        graph = infinicore.stop_graph_recording()
    graph.run()
    return result, graph


x, y = ours(4, 6), ours(4, 6)
t = infinicore.from_torch(torch.rand(6, 4)).permute([1, 0])
# (a call, another one that must not be taken for it).
PAIRS: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
    (lambda: infinicore.abs(x), lambda: infinicore.abs(t)),
    (lambda: infinicore.abs(x), lambda: infinicore.abs(ours(4, 7))),
    (lambda: infinicore.abs(x), lambda: infinicore.abs(ours(4, 6, dtype=torch.bfloat16))),
    (lambda: infinicore.sum(x, 0), lambda: infinicore.sum(x, 1)),
    (lambda: infinicore.sum(x, 0), lambda: infinicore.sum(x, 0, True)),
    (lambda: infinicore.isclose(x, x), lambda: infinicore.isclose(x, y)),
    (lambda: infinicore.reshape(x, [24]), lambda: infinicore.reshape(t, [24])),
    (lambda: infinicore.logsumexp(x, dim=0), lambda: infinicore.logsumexp(dim=1, input=x)),
]


@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_calls_that_are_alike_and_calls_that_are_not(pair: int) -> None:
    for call in (*PAIRS[pair], *PAIRS[pair]):
        expected = call()  # eagerly
        result, _ = recorded(call)
        assert result.shape == expected.shape and result.stride() == expected.stride()
        assert result.dtype == expected.dtype
        assert (torch.from_dlpack(result) == torch.from_dlpack(expected)).all()


def test_results_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compute = torch.logsumexp
    find = _noting.Recorder._found_results
    monkeypatch.setattr(_noting.Recorder, "_found_results", lambda *args: calls.append(args) or find(*args))
    infinicore.start_graph_recording()
    first = [infinicore.logsumexp(ours(5, 3), 0) for _ in range(4)]
    graph = infinicore.stop_graph_recording()
    graph.run()
    assert [func for _, func, *_ in calls if "logsumexp" in str(func)] == [torch.ops.aten.logsumexp.default]
    expected = compute(torch.from_dlpack(ours(5, 3)), 0)
    assert all((torch.from_dlpack(one) == expected).all() for one in first)
    assert len({torch.from_dlpack(one).data_ptr() for one in first}) == 4, "each has memory of its own"


def test_views_of_other_tensors() -> None:
    """Views lie in the memory of the call's own arguments."""
    a, b = ours(4, 6), ours(4, 6)
    infinicore.start_graph_recording()
    views = [infinicore.transpose(one, 0, 1) for one in (a, b, a)]
    infinicore.stop_graph_recording()
    assert [view.data_ptr() for view in views] == [a.data_ptr(), b.data_ptr(), a.data_ptr()]
    assert all(view.shape == [6, 4] for view in views)


def test_errors_are_those_of_torch() -> None:
    """What is refused is refused each time, and says what is wrong."""
    infinicore.start_graph_recording()
    try:
        for _ in range(2):
            with pytest.raises((RuntimeError, IndexError), match="infinicore.logsumexp: "):
                infinicore.logsumexp(x, 5)
    finally:
        infinicore.stop_graph_recording()
    assert not _noting._memo


def test_what_is_known_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_noting, "MEMO_SIZE", 8)
    for size in range(1, 20):
        recorded(lambda: infinicore.abs(ours(size)))  # noqa: B023
    assert len(_noting._memo) == 8


def test_a_graph_of_our_ops_imports_no_compiler() -> None:
    code = (
        "import sys, torch, torch_infini.compat.infinicore as ic\n"
        "x = ic.from_torch(torch.ones(3))\n"
        "ic.start_graph_recording(); y = ic.add(ic.add(x, x), x); g = ic.stop_graph_recording(); g.run()\n"
        "assert torch.from_dlpack(y).tolist() == [3, 3, 3]\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    run_python(code, check=True)
