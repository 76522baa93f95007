"""Providers: registered and chosen by name, reached through every form of an op, and what is refused of them.

Every op is computed by a provider that calls our kernel: its results, gradients and writes are then as without one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import torch_infini
from torch_infini import ops, runtime
from torch_infini.__main__ import main
from torch_infini.ops import register_provider, unregister_provider, use_provider
from torch_infini.testing import as_tuple, call, check_against_reference, copied
from torch_infini.testing.ops import OP_INFOS, OpInfo, all_op_infos

ROOT = Path(__file__).resolve().parent.parent
infini = torch.ops.infini


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    ops.choose_providers("")
    for provider in ops.chosen_providers():
        use_provider(provider.op, "infini")
    for provider in ops.providers():
        unregister_provider(provider.op, provider.name, device=provider.device)


def kernels(op: str, key: str = "CPU") -> list[str]:
    """What the dispatcher has for the op's functional form, the newest first."""
    return [line for line in torch._C._dispatch_dump(f"infini::{op}").splitlines() if line.startswith(key)]


class Counted:
    """silu, one off, so that its results are told from ours; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.nn.functional.silu(x).contiguous() + 1


@pytest.fixture
def counted() -> Counted:
    return register_provider("silu", Counted(), device="cpu", name="counted")


def test_registering_changes_nothing(counted: Counted) -> None:
    before = kernels("silu")
    register_provider("silu", lambda x: x + 2, device="cuda", name="other")
    x = torch.randn(3, 5)
    torch.testing.assert_close(infini.silu(x), torch.nn.functional.silu(x))
    assert counted.calls == 0 and kernels("silu") == before and len(before) == 1
    assert [(p.op, p.device, p.name) for p in ops.providers("silu")] == [
        ("silu", "cpu", "counted"),
        ("silu", "cuda", "other"),
    ]
    assert ops.providers("rms_norm") == ops.chosen_providers() == []


def test_every_form(counted: Counted) -> None:
    x = torch.randn(3, 5)
    want = torch.nn.functional.silu(x) + 1
    with use_provider("silu", "counted"):
        out, place = torch.empty(5, 3).t(), x.clone()
        assert infini.silu.out(x, out=out) is out
        assert infini.silu_(place) is None
        for got in (infini.silu(x), infini.silu(x=x), ops.silu(x), out, place, ops.silu(x, out=x.clone())):
            torch.testing.assert_close(got, want)
        x_and_out = x.clone()
        infini.silu.out(x_and_out, out=x_and_out)
        torch.testing.assert_close(x_and_out, want)
        assert counted.calls == 7
        assert infini.silu(torch.empty(0, 4)).shape == (0, 4)


def test_the_end_restores(counted: Counted) -> None:
    """Our own kernel again, with nothing over it: also of nested choices, and after an error."""
    before, x = kernels("silu"), torch.randn(4)
    ours = infini.silu(x)
    register_provider("silu", lambda x: x + 2, device="cpu", name="two")
    with use_provider("silu", "counted"):
        with pytest.raises(ZeroDivisionError), use_provider("silu", "two"):
            assert torch.equal(infini.silu(x), x + 2)
            with use_provider("silu", "infini"):
                assert torch.equal(infini.silu(x), ours) and kernels("silu") == before
            assert torch.equal(infini.silu(x), x + 2)
            raise ZeroDivisionError
        assert [p.name for p in ops.chosen_providers("cpu")] == ["counted"]
        assert counted.calls == 0
        infini.silu(x)
        assert counted.calls == 1
    assert torch.equal(infini.silu(x), ours) and kernels("silu") == before
    use_provider("silu", "two")  # without a with: from now on
    assert torch.equal(infini.silu(x), x + 2)
    use_provider("silu", "infini", device="cpu")
    assert torch.equal(infini.silu(x), ours) and kernels("silu") == before and ops.chosen_providers() == []


def test_defaults_are_the_schemas() -> None:
    """What the caller leaves out the provider gets all the same, as its own defaults may be others."""
    seen = []

    @register_provider("rms_norm", device="cpu", name="own")
    def rms_norm(x: Tensor, weight: Tensor, eps: float = 0.5, rounding: int = 7) -> Tensor:
        seen.append((eps, rounding))
        return x + eps

    assert rms_norm(torch.zeros(1), torch.zeros(1)).item() == 0.5  # the decorator leaves the function as it is
    with use_provider("rms_norm", "own"):
        infini.rms_norm(torch.ones(2, 3), torch.ones(3))
        infini.rms_norm(torch.ones(2, 3), torch.ones(3), rounding=1)
        infini.rms_norm.out(torch.ones(2, 3), torch.ones(3), 0.25, out=torch.empty(2, 3))
        ops.rms_norm(torch.ones(2, 3), torch.ones(3), rounding="gemma")
    assert seen[1:] == [(1e-6, 0), (1e-6, 1), (0.25, 0), (1e-6, 2)]


def test_an_out_of_its_own() -> None:
    calls = []

    def out(x: Tensor, *, out: Tensor) -> None:
        calls.append("out")
        out.numpy()[:] = x.numpy() + 3  # as a kernel writes: torch counts no write

    register_provider("silu", lambda x: x + 3, device="cpu", name="three", out=out)
    x, y = torch.randn(2, 3), torch.empty(2, 3)
    with use_provider("silu", "three"):
        infini.silu.out(x, out=y)
        assert torch.equal(y, x + 3) and calls == ["out"] and y._version == 1
        infini.silu_(y)
        assert torch.equal(y, x + 6) and calls == ["out"]
        with pytest.raises(RuntimeError, match=re.escape("infini::silu: out must have shape [2, 3], got [2, 4]")):
            infini.silu.out(x, out=torch.empty(2, 4))
        with pytest.raises(RuntimeError, match="infini::silu: out must be float32, got float64"):
            infini.silu.out(x, out=torch.empty(2, 3, dtype=torch.float64))


def pass_on(spec: OpInfo) -> Callable[..., Any]:
    """A provider that calls our kernel."""
    onward = torch.library.get_kernel(spec.op, "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    names = ", ".join(spec.arguments)
    scope = {"onward": onward, "keys": keys}
    exec(f"def provided({names}): return onward.call_boxed(keys, {names})", scope)
    provided: Callable[..., Any] = scope["provided"]
    return provided


@pytest.mark.parametrize("spec", list(all_op_infos()), ids=lambda spec: spec.name)
def test_every_op(spec: OpInfo) -> None:
    """Results of all forms against the reference: what our kernels promise passes the checks."""
    register_provider(spec.name, pass_on(spec), device="cpu", name="same")
    ran = 0
    with use_provider(spec.name, "same"):
        assert len(kernels(spec.name)) == 2
        for dtype in spec.dtypes:
            for sample in list(spec.samples(dtype))[:6]:
                result = call(spec, sample)
                check_against_reference(spec, sample, dtype, result)
                ran += 1
                if not spec.outputs:
                    continue
                outs = dict(zip(spec.out_names, map(torch.empty_like, as_tuple(result)), strict=True))
                spec.out(*sample.args, **sample.kwargs, **outs)
                assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(outs.values(), as_tuple(result)))
                if spec.inplace:
                    place = spec.arguments.index(spec.inplace)
                    args = [copied(a) if i == place else a for i, a in enumerate(sample.args)]
                    assert getattr(infini, f"{spec.name}_")(*args, **sample.kwargs) is None
                    check_against_reference(spec, sample, dtype, args[place])
    assert ran


class TestAutograd:
    """As with our kernels."""

    @pytest.fixture(autouse=True)
    def chosen(self, counted: Counted) -> None:
        use_provider("silu", "counted")

    def test_backward_raises(self) -> None:
        y = infini.silu(torch.ones(3, requires_grad=True))
        assert y.requires_grad
        with pytest.raises(RuntimeError, match="^infini::silu has no backward: "):
            y.sum().backward()
        with torch.no_grad():
            assert not infini.silu(torch.ones(3, requires_grad=True)).requires_grad

    def test_writing_forms_refuse(self) -> None:
        x = torch.ones(3, requires_grad=True)
        sentence = "^infini::silu: every tensor must be detached, .*, got x that requires a gradient$"
        for form in (lambda: infini.silu_(x), lambda: infini.silu.out(x, out=torch.empty(3))):
            with pytest.raises(RuntimeError, match=sentence):
                form()
        with torch.no_grad():
            infini.silu_(x)

    def test_tangents_are_refused(self) -> None:
        sentence = "^infini::silu: every tensor must be without a tangent"
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=sentence):
            infini.silu(forward_ad.make_dual(torch.ones(3), torch.ones(3)))

    def test_writes_are_counted(self) -> None:
        x, out = torch.ones(3), torch.empty(3)
        infini.silu.out(x, out=out)
        infini.silu_(x)
        assert (x._version, out._version) == (1, 1)

    def test_inference_tensors(self) -> None:
        with torch.inference_mode():
            x = torch.ones(3)
            infini.silu_(x)
        for form in (lambda: infini.silu_(x), lambda: infini.silu.out(torch.ones(3), out=x)):
            with pytest.raises(
                RuntimeError, match="^infini::silu: Inplace update to inference tensor outside InferenceMode"
            ):
                form()
        assert infini.silu(x).tolist() == pytest.approx([x[0].sigmoid().item() * x[0].item() + 1] * 3)

    def test_the_function_sees_no_autograd(self) -> None:
        def silu(x: Tensor) -> Tensor:
            assert not torch.is_grad_enabled()
            return torch.nn.functional.silu(x)

        register_provider("silu", silu, device="cpu", name="looks")
        with use_provider("silu", "looks"):
            infini.silu(torch.ones(3, requires_grad=True))


def test_an_op_that_writes_into_its_arguments() -> None:
    spec = OP_INFOS["paged_caching"]
    provided, seen = pass_on(spec), []

    @register_provider("paged_caching", device="cpu", name="writes")
    def paged_caching(*args: Any) -> Any:
        seen.append(len(args))
        return provided(*args)

    sample = next(iter(spec.samples(torch.float32)))
    with use_provider("paged_caching", "writes"):
        check_against_reference(spec, sample, torch.float32, call(spec, sample))
        args = [copied(a) for a in sample.args]
        before = [value._version for value in args]
        spec.op(*args, **sample.kwargs)
        assert [value._version - version for value, version in zip(args, before)] == [1, 1, 0, 0, 0]

    def silent(k_cache: Tensor, v_cache: Tensor, *rest: Any) -> None:
        k_cache.numpy().fill(0)  # torch counts no write

    register_provider("paged_caching", silent, device="cpu", name="silent")
    with use_provider("paged_caching", "silent"):
        before = [value._version for value in args]
        spec.op(*args, **sample.kwargs)
        assert [value._version - version for value, version in zip(args, before)] == [1, 1, 0, 0, 0]
    assert seen == [len(spec.arguments)] * 2
    register_provider("paged_caching", lambda *args: args[0], device="cpu", name="returns")
    with use_provider("paged_caching", "returns"), pytest.raises(RuntimeError, match="must write into its arguments"):
        call(spec, sample)
    with pytest.raises(ValueError, match="out must be left out, for paged_caching writes into its arguments"):
        register_provider("paged_caching", provided, device="cpu", name="third", out=provided)


WRONG: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda x: x[:, :2] + 1, "its result must have shape [2, 3], as the op's is, got [2, 2]"),
    (lambda x: x.double(), "its result must be float32, as the op's is, got float64"),
    (lambda x: x.to("meta"), "its result must be on cpu, as the op's is, got meta"),
    (lambda x: (x + 1).t().contiguous().t(), "its result must be contiguous, as the op's is, got strides [1, 2]"),
    (lambda x: x, "its result must be in memory of its own, got that of an argument or of another output"),
    (lambda x: x.view(2, 3), "its result must be in memory of its own, got that of an argument or of another output"),
    (lambda x: None, "its result must be a tensor, got None"),
    (lambda x: (x + 1,), "its result must be a tensor, got (tensor("),
    (lambda x: (x + 1).requires_grad_(), "its result must be detached, as the op has no backward, got a gradient"),
]


@pytest.mark.parametrize(("fn", "sentence"), WRONG, ids=[sentence[:40] for _, sentence in WRONG])
def test_wrong_results_are_refused(fn: Callable[[Tensor], Any], sentence: str) -> None:
    register_provider("silu", fn, device="cpu", name="wrong")
    x, out = torch.randn(2, 3), torch.full((2, 3), 9.0)
    y = x.clone()
    with use_provider("silu", "wrong"):
        for form in (lambda: infini.silu(x), lambda: infini.silu.out(x, out=out), lambda: infini.silu_(y)):
            with pytest.raises(RuntimeError) as caught:
                form()
            assert str(caught.value).startswith(f"infini::silu: provider 'wrong' on cpu: {sentence}")
    assert bool((out == 9).all()) and torch.equal(x, y)


def test_wrong_numbers_of_results_are_refused() -> None:
    x, weight = torch.randn(2, 3), torch.ones(3)
    for name, fn, sentence in (
        ("one", lambda x, residual, *rest: x + 1, "must return a tuple of 2 tensors, got tensor"),
        ("three", lambda x, residual, *rest: (x + 1, x + 1, x + 1), "must return a tuple of 2 tensors, got (tensor"),
        ("shape", lambda x, residual, *rest: (x + 1, x[0] + 1), "output 1 must have shape [2, 3], as the op's is, got"),
        ("same", lambda x, residual, *rest: (residual + x,) * 2, "output 1 must be in memory of its own"),
    ):
        register_provider("add_rms_norm", fn, device="cpu", name=name)
        with use_provider("add_rms_norm", name), pytest.raises(RuntimeError, match=re.escape(sentence)):
            infini.add_rms_norm(x, x, weight)


def test_bad_calls_meet_the_ops_rules(counted: Counted) -> None:
    """The fake's rules and those of devices; an error of the function comes as it is."""
    register_provider("rms_norm", lambda x, weight, eps, rounding: x / weight, device="cpu", name="plain")
    with use_provider("silu", "counted"), use_provider("rms_norm", "plain"):
        with pytest.raises(RuntimeError, match="size of tensor"):
            infini.rms_norm(torch.ones(2, 3), torch.ones(4))
        with pytest.raises(RuntimeError, match=r"out must be on the device of x, cpu, got meta"):
            infini.silu.out(torch.ones(2), out=torch.empty(2, device="meta"))
        assert counted.calls == 0


def test_dtypes() -> None:
    register_provider("silu", lambda x: x + 1, device="cpu", name="half", dtypes=(torch.bfloat16, torch.float16))
    with use_provider("silu", "half"):
        assert infini.silu(torch.zeros(2, dtype=torch.bfloat16)).tolist() == [1, 1]
        with pytest.raises(RuntimeError) as caught:
            infini.silu(torch.zeros(2))
    assert str(caught.value) == (
        "infini::silu: provider 'half' on cpu serves bfloat16, float16, got x of float32 (use_provider('silu', "
        "'infini') goes back to our kernels)"
    )


OP = "op must be one that `python -m torch_infini ops` lists, got 'slu'"
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"op": "slu"}, ValueError, OP),
    ({"device": "warp"}, ValueError, "device must be a type of device that torch knows, got 'warp'"),
    ({"device": "cuda:1"}, ValueError, "device must be a type of device, without a number, got 'cuda:1'"),
    ({"name": "infini"}, ValueError, "name must be of letters, digits and '_.-', and not 'infini', got 'infini'"),
    ({"name": "a=b"}, ValueError, "name must be of letters, digits and '_.-', and not 'infini', got 'a=b'"),
    ({"dtypes": ()}, ValueError, "dtypes must be one or more of torch's, or None for all, got ()"),
    ({"dtypes": ("float32",)}, ValueError, "dtypes must be one or more of torch's, or None for all, got ('float32',)"),
    ({"fn": 3}, TypeError, "fn must be a function of (x), got 3"),
    ({"fn": lambda: None}, TypeError, "fn must take the op's arguments, all by position, (x), got (): too many"),
    ({"fn": lambda x, y: x}, TypeError, "all by position, (x), got (x, y): missing a required argument: 'y'"),
    ({"fn": lambda *, x: x}, TypeError, "all by position, (x), got (*, x): too many positional arguments"),
    ({"fn": torch.sigmoid}, TypeError, "fn must have a signature that Python can read (put a def around it), got"),
    ({"out": lambda x: x}, TypeError, "out must take the op's arguments, all by position, and its outputs by keyword"),
]


@pytest.mark.parametrize(("changed", "error", "sentence"), BAD, ids=[sentence[:60] for _, _, sentence in BAD])
def test_bad_registrations(changed: dict[str, Any], error: type[Exception], sentence: str) -> None:
    arguments = {"op": "silu", "fn": lambda x: x + 1, "device": "cpu", "name": "good", **changed}
    with pytest.raises(error, match=re.escape(sentence)):
        register_provider(**arguments)
    assert ops.providers() == []


def test_bad_choices(counted: Counted) -> None:
    with pytest.raises(ValueError, match=OP):
        use_provider("slu", "counted")
    with pytest.raises(ValueError, match=OP):
        ops.providers("slu")
    with pytest.raises(ValueError) as caught:
        use_provider("silu", "cuonted")
    assert str(caught.value) == (
        "torch_infini.ops.use_provider: name must be 'infini' or a provider that is registered for silu, got 'cuonted' "
        "(there is 'counted' on cpu)"
    )
    with pytest.raises(ValueError, match=re.escape("for silu on cuda, got 'counted' (there is 'counted' on cpu)")):
        use_provider("silu", "counted", device="cuda")
    with pytest.raises(ValueError, match=re.escape("for relu, got 'counted' (there is none)")):
        use_provider("relu", "counted")
    with pytest.raises(ValueError, match=r"name must be new for silu on cpu .*, got 'counted'"):
        register_provider("silu", lambda x: x, device="cpu", name="counted")
    with use_provider("silu", "counted"), pytest.raises(ValueError, match="must not be in use, got 'counted' for silu"):
        unregister_provider("silu", "counted")
    unregister_provider("silu", "counted", device="cpu")
    assert ops.providers() == []


def test_threads(counted: Counted) -> None:
    """A choice holds in all of them."""
    x = torch.randn(64, 8)
    want = torch.nn.functional.silu(x) + 1
    with use_provider("silu", "counted"), ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: infini.silu(x), range(200)):
            torch.testing.assert_close(got, want)


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

    x = torch.randn(4)
    program = runtime.program(lambda: infini.silu(x))
    assert recorder(torch.device("cpu")) is not None
    with use_provider("silu", "counted"):
        for fn in (lambda: infini.silu(x), lambda: infini.silu_(x), lambda: infini.silu.out(x, out=x)):
            with pytest.raises(RuntimeError, match="must have our kernel.*, got silu from provider 'counted'"):
                runtime.program(fn)
        assert recorder(torch.device("cpu")) is None
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
            .completions[0]
            .tokens
        )

    want = generate()
    assert not calls
    with use_provider("rms_norm", "counts"):
        assert generate() == want
    assert calls.count(1) >= 4


# ---- INFINI_PROVIDERS ----


@pytest.mark.parametrize("setting", ["silu=one", "silu@cpu=one", " rms_norm=x , silu=one,", "silu@cpu=one,silu@cuda=y"])
@pytest.mark.parametrize("early", [True, False])
def test_setting(setting: str, early: bool) -> None:
    """A provider that is registered is chosen, and one that will be as soon as it is."""
    x, before = torch.zeros(3), kernels("silu")
    if early:
        register_provider("silu", lambda x: x + 1, device="cpu", name="one")
    ops.choose_providers(setting)
    assert ("silu" in " ".join(ops.awaited_providers())) == (not early or "cuda" in setting)
    register_provider("silu", lambda x: x + 2, device="cpu", name="two")
    if not early:
        assert ops.chosen_providers() == []
        register_provider("silu", lambda x: x + 1, device="cpu", name="one")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert infini.silu(x).tolist() == [1, 1, 1]
    use_provider("silu", "infini")
    assert infini.silu(x).tolist() == [0, 0, 0]
    assert kernels("silu") == before
    register_provider("silu", lambda x: x + 3, device="cuda", name="one")  # for each device
    assert [p.device for p in ops.chosen_providers()] == ([] if "@" in setting else ["cuda"])


def test_setting_without_a_provider() -> None:
    """Our kernels compute; the first call of any form warns, once; it is listed as missing."""
    register_provider("silu", lambda x: x + 1, device="cpu", name="one")
    ops.choose_providers("silu=oen")
    assert ops.awaited_providers() == ["silu=oen"]
    x = torch.zeros(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        infini.rms_norm(torch.ones(2, 3), torch.ones(3))
        assert not caught
        infini.silu_(x)
        assert infini.silu(x).tolist() == infini.silu.out(x, out=x).tolist() == [0, 0, 0]
    (warning,) = caught
    assert str(warning.message) == (
        "torch_infini: INFINI_PROVIDERS has silu=oen, but no such provider is registered (there is 'one' on cpu): "
        "torch_infini's own kernel computes silu"
    )


ONE_ENTRY = "must have one entry for an op, or one for each of its devices"


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("silu", "INFINI_PROVIDERS must be op=name or op@device=name, with commas between, got 'silu'"),
        ("silu=", "INFINI_PROVIDERS must be op=name or op@device=name, with commas between, got 'silu='"),
        ("slu=a", "INFINI_PROVIDERS: op must be one that `python -m torch_infini ops` lists, got 'slu'"),
        ("silu@warp=a", "INFINI_PROVIDERS: device must be a type of device that torch knows, got 'warp'"),
        ("silu=a,silu=b", f"INFINI_PROVIDERS {ONE_ENTRY}, got 'silu=b' too"),
        ("silu@cpu=a,silu=b", f"INFINI_PROVIDERS {ONE_ENTRY}, got 'silu=b' too"),
        ("silu=a,silu@cpu=b", f"INFINI_PROVIDERS {ONE_ENTRY}, got 'silu@cpu=b' too"),
    ],
)
def test_bad_setting(setting: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        ops.choose_providers(setting)
    assert str(caught.value) == sentence
    assert ops.awaited_providers() == []


def test_commands_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*arguments: str) -> tuple[int, list[str]]:
        status = main([*arguments])
        return status, capsys.readouterr().out.splitlines()

    _, without = shown("ops")
    register_provider("silu", lambda x: x + 1, device="cpu", name="one")
    register_provider("silu", lambda x: torch.nn.functional.silu(x).contiguous(), device="cpu", name="right")
    use_provider("silu", "right")
    ops.choose_providers("relu=two")
    _, with_ = shown("ops")
    assert with_[0].split() == [*without[0].split()[:-1], "providers", "schema"]
    assert [re.split("  +", line)[-2:] for line in with_ if line.startswith("silu ")] == [
        ["one@cpu, right@cpu (in use)", "(Tensor x) -> Tensor"]
    ]
    facts = json.loads("\n".join(shown("env", "--json")[1]))
    assert (facts["providers"], facts["providers_missing"]) == (["silu on cpu by right"], ["relu=two"])
    status, lines = shown("doctor", "--ops", "silu", "--verbose")
    assert status == 1 and "ok      silu on cpu by right" in lines
    sentence = "nothing that this command imports registers relu=two: our kernels compute"
    assert f"FAILED  INFINI_PROVIDERS: {sentence}" in lines
    use_provider("silu", "one")
    assert any(line.startswith("FAILED  silu on cpu by one: ") for line in shown("doctor", "--ops", "silu")[1])


FAKE_NTOPS = """
def silu(input, inplace=False):
    return input
"""


def test_ntops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported when it is asked for and not before; for CUDA alone."""
    if importlib.util.find_spec("ntops"):
        pytest.skip("ntops is installed")
    none = "torch_infini.ops.use_provider: name must be 'infini' or a provider that is registered for"
    with pytest.raises(ValueError) as caught:
        use_provider("silu", "ntops")
    assert str(caught.value) == f"{none} silu, got 'ntops' (there is none; the package ntops is not installed)"
    ops.choose_providers("silu=ntops")
    assert ops.awaited_providers() == ["silu=ntops"]
    (tmp_path / "ntops").mkdir()
    (tmp_path / "ntops" / "__init__.py").write_text("")
    (tmp_path / "ntops" / "torch.py").write_text(FAKE_NTOPS)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert ops.providers() == [] and "ntops" not in sys.modules
        with pytest.raises(ValueError) as caught:
            use_provider("relu", "ntops")
        assert str(caught.value) == f"{none} relu, got 'ntops' (there is none)" and "ntops" not in sys.modules
        with pytest.raises(ValueError) as caught:
            use_provider("silu", "ntops", device="cpu")
        assert str(caught.value) == f"{none} silu on cpu, got 'ntops' (there is 'ntops' on cuda)"
        ops.choose_providers("silu=ntops")
        assert ops.awaited_providers() == []
        (provider,) = ops.chosen_providers()
        assert (provider.op, provider.device, provider.name) == ("silu", "cuda", "ntops")
        assert provider.fn is sys.modules["ntops.torch"].silu
        assert infini.silu(torch.zeros(2)).tolist() == [0, 0] and len(kernels("silu")) == 1
    finally:
        sys.modules.pop("ntops", None)
        sys.modules.pop("ntops.torch", None)


# ---- in a process of its own: what is read at import, and what torch does once in a process ----


def python(code: str, setting: str | None, **more: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}
    environment.pop("INFINI_PROVIDERS", None)
    if setting is not None:
        environment["INFINI_PROVIDERS"] = setting
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)


PLUGIN = """
import torch, torch_infini
torch_infini.ops.register_provider("silu", lambda x: x + 1, device="cpu", name="one")
print(torch.ops.infini.silu(torch.zeros(3)).tolist())
"""


def test_variable() -> None:
    """Nothing is warned of, neither by us nor by torch of a kernel that is laid over another; the call is logged."""
    done = python(PLUGIN, "silu=one", INFINI_LOG="2")
    assert (done.stdout, done.stderr) == ("[1.0, 1.0, 1.0]\n", "infini::silu(x=float32[3])\n")
    done = python(PLUGIN, "silu=oen")
    assert (
        done.stdout == "[0.0, 0.0, 0.0]\n" and "UserWarning: torch_infini: INFINI_PROVIDERS has silu=oen" in done.stderr
    )
    done = python(PLUGIN, "silu")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: torch_infini: INFINI_PROVIDERS must be op=name or op@device=name, with commas between, got 'silu'"
    )


TRITON = """
import torch, torch_infini, triton
import triton.language as tl
from torch_infini.ops import register_provider, use_provider

launches = 0

@triton.jit
def silu_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside).to(tl.float32)
    tl.store(y + at, value / (1 + tl.exp(-value)), mask=inside)

@register_provider("silu", device="cpu", name="triton")
def silu(x):
    global launches
    launches += 1
    x = x.contiguous()
    y = torch.empty_like(x)
    silu_kernel[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), BLOCK=256)
    return y

x = torch.randn(7, 133)
ours = torch.ops.infini.silu(x)
with use_provider("silu", "triton"):
    torch.testing.assert_close(torch.ops.infini.silu(x), ours)
    torch.testing.assert_close(torch.ops.infini.silu(x.t()), ours.t().contiguous())
    torch.testing.assert_close(torch.compile(torch.ops.infini.silu, fullgraph=True, backend="aot_eager")(x), ours)
print("launches", launches)
"""


def test_triton(tmp_path: Path) -> None:
    """A Triton kernel, interpreted on the CPU."""
    pytest.importorskip("triton")
    script = tmp_path / "script.py"
    script.write_text(TRITON)
    done = python(f"import runpy; runpy.run_path({str(script)!r})", None, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["launches 3"]
