"""Providers below torch.compile, patch, programs and the engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_infini
from support.provider_counts import Counted, drop_providers, infini, pass_on
from torch_infini import runtime
from torch_infini.ops import register_provider, use_provider
from torch_infini.testing.ops import OP_INFOS


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    drop_providers()


@pytest.fixture
def counted() -> Counted:
    return register_provider("silu", Counted(), device="cpu", name="counted")


class TestCompiled:
    @pytest.mark.parametrize("backend", ["infini", "aot_eager"])
    def test_no_graph_break(self, backend: str, counted: Counted, no_graphs_left: None) -> None:
        """Shapes are the fake's; the graph calls whatever is chosen when it runs."""
        f = torch.compile(lambda x: infini.silu(x * 2) * 2, backend=backend, fullgraph=True, dynamic=True)
        want = lambda x: (torch.nn.functional.silu(x * 2) + 1) * 2
        with torch.no_grad(), use_provider("silu", "counted"):
            for rows in (2, 5):
                x = torch.randn(rows, 4)
                torch.testing.assert_close(f(x), want(x))
        assert counted.calls == 2
        with torch.no_grad():
            torch.testing.assert_close(f(x), torch.nn.functional.silu(x * 2) * 2)

    def test_writing_forms(self, counted: Counted, no_graphs_left: None) -> None:
        def f(x: Tensor, out: Tensor) -> Tensor:
            infini.silu_(x)
            infini.silu.out(x, out=out)
            return out + 1

        x, out = torch.randn(3, 4), torch.empty(3, 4)
        once = torch.nn.functional.silu(x) + 1
        with torch.no_grad(), use_provider("silu", "counted"):
            got = torch.compile(f, fullgraph=True)(x, out)
        torch.testing.assert_close(x, once)
        torch.testing.assert_close(got, torch.nn.functional.silu(once) + 2)
        torch.testing.assert_close(out, got - 1)

    def test_backward_raises(self, counted: Counted, no_graphs_left: None) -> None:
        with use_provider("silu", "counted"):
            y = torch.compile(lambda x: infini.silu(x) * 2)(torch.ones(3, requires_grad=True))
            with pytest.raises(RuntimeError, match="infini::silu has no backward"):
                y.sum().backward()

    def test_decomposed_ops_stay_calls(self, no_graphs_left: None) -> None:
        """The backend "infini" writes relu in aten ops, past any provider, unless one computes it."""
        calls = []

        @register_provider("relu", device="cpu", name="counts")
        def relu(x: Tensor) -> Tensor:
            calls.append(x.shape)
            return torch.relu(x)

        def compiled(**options: Any) -> None:
            torch._dynamo.reset()
            torch.compile(lambda x: infini.relu(x) * 2, backend="infini", options=options or None)(torch.randn(4))

        with torch.no_grad():
            compiled()
            assert not calls
            with use_provider("relu", "counts"):
                compiled()
                assert len(calls) == 1
                compiled(decompose=("relu",))  # asked for by name
                assert len(calls) == 1


def test_patched_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[1, 2, 3]])
    calls = []

    @register_provider("rms_norm", device="cpu", name="eager")
    def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: int) -> Tensor:
        calls.append(tuple(x.shape))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    with torch.no_grad():
        want = model(ids).logits
        torch_infini.patch_model(model)
        calls.clear()
        with use_provider("rms_norm", "eager"):
            torch.testing.assert_close(model(ids).logits, want, atol=1e-5, rtol=1e-4)
    assert calls and set(calls) == {(1, 3, 32)}


def test_programs_refuse(counted: Counted) -> None:
    """They are replayed without Python; the engine then decodes without one."""
    from torch_infini.engine.decode import recorder

    x, model = torch.randn(4), SimpleNamespace(device=torch.device("cpu"), kernels_only=True)
    program = runtime.program(lambda: infini.silu(x))
    assert recorder(model) is not None
    with use_provider("silu", "counted"):
        for fn in (lambda: infini.silu(x), lambda: infini.silu_(x), lambda: infini.silu.out(x, out=x)):
            with pytest.raises(RuntimeError, match="must have our kernel.*, got silu from provider 'counted'"):
                runtime.program(fn)
        assert recorder(model) is None
        torch.testing.assert_close(program.replay(), torch.nn.functional.silu(x))  # as it was recorded
    assert counted.calls == 0


def test_engine(one_thread: None) -> None:
    """The same tokens, prefill and decode both computed by the provider."""
    calls = []
    spec = OP_INFOS["rms_norm"]
    provided = pass_on(spec)

    @register_provider("rms_norm", device="cpu", name="counts")
    def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: int) -> Any:
        calls.append(x.shape[0])
        return provided(x, weight, eps, rounding)

    def generate() -> list[int]:
        llm = torch_infini.LLM(torch_infini.demo.MODEL)
        return (
            llm.generate(["A class"], torch_infini.SamplingParams(max_tokens=5, temperature=0.0))[0]
            .outputs[0]
            .token_ids
        )

    want = generate()
    assert not calls
    with use_provider("rms_norm", "counts"):
        assert generate() == want
    assert calls.count(1) >= 4
