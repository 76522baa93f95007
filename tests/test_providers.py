"""Providers: registered and chosen by name, reached through every form of an op, and what is refused of them.

Every op is computed by a provider that calls our kernel: its results, gradients and writes are then as without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from support.provider_counts import Counted, drop_providers, infini, kernels, pass_on
from torch_infini import ops
from torch_infini.ops import register_provider, unregister_provider, use_provider
from torch_infini.testing import as_tuple, call, check_against_reference
from torch_infini.testing.compare import copied
from torch_infini.testing.ops import OP_INFOS, OpInfo, all_op_infos


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    drop_providers()


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
