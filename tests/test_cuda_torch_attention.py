"""Plain prefill on CUDA that torch's own attention computes: which calls it gets, and that they are right.

In the emulation torch's attention for the CPU stands for CUDA's, and a function in the test for what torch chooses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.fresh_python import run_python
from torch_infini._core import attention
from torch_infini._core.attention import OPERATORS, signature, torch_attention_from, torch_attention_from_set_to
from torch_infini._core.library import emulates_cuda
from torch_infini.testing import check_against_reference, cuda_device
from torch_infini.testing.ops import OP_INFOS, Sample
from torch_infini.testing.ops.attention import attention_inputs

ROOT = Path(__file__).resolve().parent.parent
DEVICE = cuda_device()
pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")
needs_cuda = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")
needs_emulation = pytest.mark.skipif(not emulates_cuda(), reason="stand-ins are for the emulation")
SPEC = OP_INFOS["attention"]
FLASH, CUDNN, MATH = 1, 3, 0
FROM = 20  # queries, in the emulation
HALVES = (torch.bfloat16, torch.float16)


def inputs(dtype: torch.dtype, *sizes: int) -> list[Tensor]:
    return [t.to(DEVICE) for t in attention_inputs(dtype, *sizes)]


def check(actual: Tensor, *args: Tensor, **kwargs: Any) -> None:
    q, *others = (t.cpu() for t in args)
    assert actual.is_contiguous() and actual.dtype == q.dtype and actual.shape == q.shape
    check_against_reference(SPEC, Sample("call", (q, *others), kwargs), q.dtype, actual.cpu(), on_cuda=True)


# ---- in the emulation ----


class Choice:
    """aten::_fused_sdp_choice for CPU tensors: answers `backend`, and keeps what it was asked."""

    def __init__(self) -> None:
        self.backend = FLASH
        self.asked: list[tuple[tuple[Tensor, ...], tuple[Any, ...]]] = []

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> int:
        self.asked.append(((q, k, v), (mask, dropout, causal, scale, enable_gqa)))
        return self.backend


@pytest.fixture
def choice() -> Iterator[Choice]:
    choice = Choice()
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_fused_sdp_choice", choice, "CPU", allow_override=True)
        with torch_attention_from_set_to(FROM):
            yield choice
    finally:
        library._destroy()


@contextmanager
def calls_of_torch() -> Iterator[list[str]]:
    """The calls of torch's attention within the scope, once it is over."""
    names: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield names
    names += [event.name for event in profile.events() if event.name == "aten::scaled_dot_product_attention"]


@needs_emulation
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("backend", [FLASH, CUDNN])
def test_calls(choice: Choice, dtype: torch.dtype, backend: int) -> None:
    choice.backend = backend
    for sizes, kwargs in (
        ((2, 20, 20, 6, 2, 64), {}),
        ((1, 33, 33, 2, 2, 256), {"scale": 0.3}),
        ((2, 20, 50, 4, 1, 8), {"causal": False}),
        ((1, 20, 1, 1, 1, 16), {"causal": False}),
    ):
        q, k, v = inputs(dtype, *sizes)
        with calls_of_torch() as names:
            y = SPEC.op(q, k, v, **kwargs)
        assert len(names) == 1
        check(y, q, k, v, **kwargs)
        given, said = choice.asked.pop()
        gqa = sizes[3] != sizes[4]
        scale = pytest.approx(kwargs.get("scale", sizes[-1] ** -0.5), rel=1e-15)
        assert said == (None, 0.0, kwargs.get("causal", True), scale, gqa)
        for mine, theirs in zip((q, k, v), given, strict=True):  # the same memory, heads first
            assert theirs.data_ptr() == mine.data_ptr() and theirs.stride() == mine.transpose(1, 2).stride()
            assert theirs.shape == mine.transpose(1, 2).shape and theirs.dtype == dtype


@needs_emulation
def test_where_results_lie(choice: Choice) -> None:
    """A result of torch's is returned as it is, unless it does not lie as the op promises, or there is an out."""
    q, k, v = inputs(torch.bfloat16, 2, 20, 20, 6, 2, 64)
    with calls_of_torch() as names:
        check(SPEC.op(q, k, v), q, k, v)
        by_heads = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        check(SPEC.op(*by_heads), q, k, v)
        fused = torch.cat([q, k, v], 2)
        check(SPEC.op(*fused.split([6, 2, 2], 2)), q, k, v)
        out = torch.empty(2, 20, 6, 128, dtype=q.dtype, device=DEVICE)[..., 64:]
        assert SPEC.out(q, k, v, out=out).data_ptr() == out.data_ptr()
        check(out.contiguous(), q, k, v)
        same = q.clone()
        SPEC.out(same, k, v, out=same)
        check(same, q, k, v)
    assert len(names) == 5


@needs_emulation
def test_calls_that_are_ours(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step from a call that is torch's, each."""
    sizes = (1, 20, 20, 4, 2, 64)
    q, k, v = inputs(torch.bfloat16, *sizes)
    others: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
        "float32": (inputs(torch.float32, *sizes), {}),
        "few queries": (inputs(torch.bfloat16, 1, 19, 19, 4, 2, 64), {}),
        "more keys": (inputs(torch.bfloat16, 1, 20, 21, 4, 2, 64), {}),
        "fewer keys": (inputs(torch.bfloat16, 1, 21, 20, 4, 2, 64), {}),
        "no keys": (inputs(torch.bfloat16, 1, 20, 0, 4, 2, 64), {"causal": False}),
        "no sequences": (inputs(torch.bfloat16, 0, 20, 20, 4, 2, 64), {}),
        "a head size that is none of flash's": (inputs(torch.bfloat16, 1, 20, 20, 4, 2, 60), {}),
        "a large head size": (inputs(torch.bfloat16, 1, 20, 20, 4, 2, 264), {}),
        "a mask": ([q, k, v], {"mask": torch.ones(1, 1, 1, 20, dtype=torch.bool, device=DEVICE)}),
        "lengths": ([q, k, v], {"kv_lens": torch.tensor([20], device=DEVICE)}),
        "a soft cap": ([q, k, v], {"softcap": 30.0}),
        "a scale below 0": ([q, k, v], {"scale": -0.1}),
        "a scale of 0": ([q, k, v], {"scale": 0.0}),
    }
    room = torch.zeros(8 + q.numel(), dtype=q.dtype, device=DEVICE)
    others["an address off by 2"] = ([room[1 : 1 + q.numel()].view_as(q).copy_(q), k, v], {})
    wide = torch.zeros(1, 20, 2, 68, dtype=q.dtype, device=DEVICE)
    others["rows off by 8"] = ([q, k, wide[..., :64].copy_(v)], {})
    for name, (tensors, kwargs) in others.items():
        check(SPEC.op(*tensors, **kwargs), *tensors, **kwargs)
        assert not choice.asked, name
    with torch_attention_from_set_to(None):
        ours = SPEC.op(q, k, v)
    assert not choice.asked
    choice.backend = MATH
    with calls_of_torch() as names:
        assert torch.equal(SPEC.op(q, k, v), ours)
    assert len(choice.asked) == 1 and not names
    choice.backend = FLASH
    monkeypatch.setenv("INFINI_EXACT_ATTENTION", "1")
    SPEC.op(q, k, v)
    assert len(choice.asked) == 1
    monkeypatch.setenv("INFINI_EXACT_ATTENTION", "0")
    check(SPEC.op(q, k, v), q, k, v)
    assert len(choice.asked) == 2


@needs_emulation
def test_autocast_to_another_type(choice: Choice) -> None:
    """torch would compute in that type."""
    q, k, v = inputs(torch.bfloat16, 1, 20, 20, 4, 2, 64)
    with torch_attention_from_set_to(None):
        ours = SPEC.op(q, k, v)
    for dtype in HALVES:
        with torch.autocast("cpu", dtype), calls_of_torch() as names:
            y = SPEC.op(q, k, v)
        assert names
        check(y, q, k, v)
        assert dtype == torch.bfloat16 or torch.equal(y, ours)


@needs_emulation
def test_what_torch_refuses_is_an_error(choice: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(torch.bfloat16, 1, 20, 20, 4, 2, 64)

    def refuse(*_: Any, **__: Any) -> int:
        raise ValueError("no")

    monkeypatch.setattr(Choice, "__call__", refuse)
    with pytest.raises(RuntimeError, match="torch_call_dispatcher"):
        SPEC.op(q, k, v)
    with pytest.raises(RuntimeError, match="infini::attention: k must have the dtype of q"):  # the rules come first
        SPEC.op(q, k.half(), v)


@needs_emulation
def test_gradients_are_refused_as_ever(choice: Choice) -> None:
    q, k, v = inputs(torch.bfloat16, 1, 20, 20, 4, 2, 64)
    y = SPEC.op(q.requires_grad_(), k, v)
    assert not any(t.requires_grad for t in choice.asked[-1][0])
    with pytest.raises(RuntimeError, match="attention"):
        y.sum().backward()


@needs_cuda
@pytest.mark.parametrize("value", ["maybe", "2", "on"])
def test_a_setting_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("INFINI_EXACT_ATTENTION", value)
    for queries in (1, 40):
        with pytest.raises(RuntimeError) as caught:
            SPEC.op(*inputs(torch.bfloat16, 1, queries, 40, 4, 2, 64))
        sentence = f"infini: INFINI_EXACT_ATTENTION must be 0 or 1, or not be set, got '{value}'"
        assert str(caught.value) == sentence


# ---- what is decided at import ----


def test_the_operators_of_this_torch_are_known() -> None:
    assert {name: signature(name) for name in OPERATORS} == OPERATORS
    assert signature("no_such_operator") == ""


def test_an_operator_that_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("INFINI_PRODUCTS", raising=False)
    if emulates_cuda():
        assert attention.refusal() == "CUDA is emulated"
        return
    assert attention.refusal() == ""
    name = "_fused_sdp_choice"
    monkeypatch.setitem(OPERATORS, name, OPERATORS[name].replace("bool", "int", 1))
    assert attention.refusal() == f"this torch has another aten::{name}"


def test_settings() -> None:
    code = "from torch_infini._core import attention as a; print(a.torch_attention_from(), a.described(), sep='|')"

    def said(products: str) -> list[str]:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "INFINI_PRODUCTS": products}
        return run_python(code, env=env, check=True).stdout.split("|")

    assert said("ours") == ["None", "torch_infini (INFINI_PRODUCTS=ours)\n"]
    if DEVICE == "cuda":
        assert said("default") == ["256", "torch_infini, plain calls from 256 queries on torch\n"]
    else:
        assert said("default")[0] == "None"


def test_from_so_many_queries_on() -> None:
    before = torch_attention_from()
    with torch_attention_from_set_to(7):
        assert torch_attention_from() == 7
        with pytest.raises(ValueError, match="the number of queries must be at least 1, got 0"):
            attention.set_torch_attention_from(0)
        assert torch_attention_from() == 7
    assert torch_attention_from() == before


# ---- on a GPU ----


@pytest.mark.skipif(DEVICE != "cuda", reason="no GPU")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("size", [64, 128])
def test_on_a_gpu(dtype: torch.dtype, size: int) -> None:
    """Long prefill against float64, eagerly and from a CUDA graph; and it is not what our kernel gives."""
    call: Callable[..., Tensor] = SPEC.op
    for sizes, causal in (((2, 300, 300, 8, 2, size), True), ((1, 256, 700, 4, 4, size), False)):
        q, k, v = inputs(dtype, *sizes)
        eager = call(q, k, v, causal=causal)
        check(eager, q, k, v, causal=causal)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = call(q, k, v, causal=causal)
        y.zero_()
        graph.replay()
        assert torch.equal(y, eager)
        with calls_of_torch() as names:
            call(q, k, v, causal=causal)
        assert len(names) == 1
