"""What autograd meets in ops that have no derivative: backward raises, writes are refused and counted.

Every registered op, eager and compiled, whatever the warnings filters say; torch.func's transforms and forward mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_infini._core.library import SEES_AUTOGRAD
from torch_infini.testing import as_tuple
from torch_infini.testing.compare import copied
from torch_infini.testing.ops import OpInfo, all_op_infos

OPS = list(all_op_infos())
FUNCTIONAL = [spec for spec in OPS if spec.outputs]
Form = tuple[torch._ops.OpOverload, list[Any], dict[str, Any], list[str]]  # (op, args, kwargs, what it writes)


def name_of(value: Any) -> str | None:
    return value.name if isinstance(value, OpInfo) else None


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def arguments(spec: OpInfo) -> tuple[list[Any], dict[str, Any]]:
    """Copies of the first sample's arguments."""
    sample = next(iter(spec.samples(spec.dtypes[0])))
    return [copied(a) for a in sample.args], {k: copied(v) for k, v in sample.kwargs.items()}


def writing_forms(spec: OpInfo) -> Iterator[Form]:
    """The op's forms that write into arguments."""
    args, kwargs = arguments(spec)
    if spec.mutates:
        yield spec.op, args, kwargs, spec.mutates
        return
    outs = dict(zip(spec.out_names, map(torch.empty_like, as_tuple(spec.op(*args, **kwargs))), strict=True))
    yield spec.out, args, {**kwargs, **outs}, spec.out_names
    if spec.inplace:
        args, kwargs = arguments(spec)
        yield getattr(torch.ops.infini, f"{spec.name}_").default, args, kwargs, [spec.inplace]


def named(spec: OpInfo, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(spec.arguments, args, strict=False)), **kwargs}


def backward_refused(spec: OpInfo, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
    results = [r for r in as_tuple(function(*args, **kwargs)) if r.is_floating_point()]
    for result in results:
        assert result.requires_grad, spec.name
        with pytest.raises(RuntimeError, match=f"^infini::{spec.name} has no backward: "):
            result.sum().backward(retain_graph=True)


def test_this_torch_is_seen() -> None:
    """libtorch exports what csrc/torch/autograd_torch.cpp asks it."""
    assert SEES_AUTOGRAD


@pytest.mark.parametrize("spec", FUNCTIONAL, ids=name_of)
def test_backward_raises(spec: OpInfo) -> None:
    """From each input alone, leaf or not, with every warning ignored; forward gives the same bits as ever."""
    args, kwargs = arguments(spec)
    expected = as_tuple(spec.op(*args, **kwargs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, value in enumerate(args):
            if not is_float(value):
                continue
            leaf = value.clone().requires_grad_()
            for followed in (leaf, leaf * 1):
                one = [*args[:i], followed, *args[i + 1 :]]
                for got, want in zip(as_tuple(spec.op(*one, **kwargs)), expected, strict=True):
                    assert torch.equal(got.detach(), want) or want.isnan().any()
                backward_refused(spec, spec.op, one, kwargs)
                assert leaf.grad is None
    with torch.no_grad():
        assert not any(r.requires_grad for r in as_tuple(spec.op(*args, **kwargs)))


@pytest.mark.parametrize("spec", FUNCTIONAL, ids=name_of)
def test_backward_raises_in_compiled_code(spec: OpInfo) -> None:
    """When backward runs, not before: the forward of a compiled training graph is served."""
    args, kwargs = arguments(spec)
    args = [a.requires_grad_() if is_float(a) else a for a in args]
    if not any(is_float(a) for a in args):
        pytest.skip("no argument can have a gradient")
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: spec.op(*args, **kwargs), backend="aot_eager", fullgraph=True)
    backward_refused(spec, compiled, args, {})


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_part_of_a_compiled_graph(backend: str) -> None:
    """The gradient by another way does not hide the one that is missing."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: (torch.ops.infini.rms_norm(x, weight) + x * 2).sum(), backend=backend, fullgraph=True
    )
    loss = compiled(x)
    with pytest.raises(RuntimeError, match="^infini::rms_norm has no backward: "):
        loss.backward()


@pytest.mark.parametrize("spec", OPS, ids=name_of)
def test_writing_refuses_what_requires_a_gradient(spec: OpInfo) -> None:
    """Each tensor in turn, leaf or not: there is no result that backward could start from."""
    for op, args, kwargs, _ in writing_forms(spec):
        for i, value in enumerate(args):
            if not is_float(value):
                continue
            leaf = value.clone().requires_grad_()
            for followed in (leaf, leaf * 1):
                one = [*args[:i], followed, *args[i + 1 :]]
                with pytest.raises(
                    RuntimeError,
                    match=rf"^infini::{spec.name}: every tensor must be detached, .* got argument {i + 1} that",
                ):
                    op(*one, **kwargs)
                with torch.no_grad():
                    op(*one, **kwargs)


@pytest.mark.parametrize("spec", OPS, ids=name_of)
def test_writes_are_counted(spec: OpInfo) -> None:
    """The version counters of what is written go up by one, and of nothing else; views share their base's."""
    for op, args, kwargs, written in writing_forms(spec):
        tensors = {k: v for k, v in named(spec, args, kwargs).items() if isinstance(v, Tensor)}
        before = {name: t._version for name, t in tensors.items()}
        op(*args, **kwargs)
        counted = {name: t._version - before[name] for name, t in tensors.items()}
        assert counted == {name: int(name in written) for name in tensors}, op
    x = torch.randn(4, 8)
    torch.ops.infini.relu_(x[:, :4])
    assert x._version == 1


def test_backward_through_what_was_overwritten() -> None:
    """Autograd notices that an op overwrote what it saved."""
    x = torch.randn(8, requires_grad=True)
    y = x * 2
    z = y.exp()
    with torch.no_grad():
        torch.ops.infini.silu_(z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("spec", OPS, ids=name_of)
def test_inference_tensors(spec: OpInfo) -> None:
    """Outside inference mode they are not written, as torch's own ops do not; inside, and read, they are served."""
    with torch.inference_mode():
        forms = list(writing_forms(spec))
        for op, args, kwargs, _ in forms:
            op(*args, **kwargs)
    for op, args, kwargs, written in forms:
        before = {k: v.clone() for k, v in named(spec, args, kwargs).items() if k in written and v is not None}
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
            op(*args, **kwargs)
        assert all(torch.equal(v, named(spec, args, kwargs)[k]) or v.isnan().any() for k, v in before.items())
    if spec.outputs:
        spec.op(*forms[0][1], **arguments(spec)[1])


@pytest.mark.parametrize("spec", OPS, ids=name_of)
def test_forward_mode_raises(spec: OpInfo) -> None:
    args, kwargs = arguments(spec)
    for i, value in enumerate(args):
        if not is_float(value):
            continue
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(value, torch.ones_like(value))
            with pytest.raises(RuntimeError, match=f"^infini::{spec.name}: every tensor must be without a tangent"):
                spec.op(*args[:i], dual, *args[i + 1 :], **kwargs)


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "jacfwd", "jacrev"])
def test_transforms_raise(transform: str) -> None:
    x, weight = torch.randn(3, 8), torch.ones(8)

    def f(x: Tensor) -> Tensor:
        return torch.ops.infini.rms_norm(x, weight).sum()

    run: Callable[[], Any] = {
        "grad": lambda: torch.func.grad(f)(x),
        "vjp": lambda: torch.func.vjp(f, x),
        "jvp": lambda: torch.func.jvp(f, (x,), (x,)),
        "jacfwd": lambda: torch.func.jacfwd(f)(x),
        "jacrev": lambda: torch.func.jacrev(f)(x),
    }[transform]
    with pytest.raises(RuntimeError, match="^infini::rms_norm has no derivative: .* got x that one follows"):
        run()


def test_transforms_that_do_not_differentiate_an_op() -> None:
    x, weight = torch.randn(3, 8), torch.ones(8)
    normed = torch.ops.infini.rms_norm(x, weight)
    assert torch.equal(torch.vmap(lambda row: torch.ops.infini.rms_norm(row, weight))(x), normed)
    gradient = torch.func.grad(lambda y: (y * torch.ops.infini.rms_norm(x, weight)).sum())(x)
    assert torch.equal(gradient, normed)


def test_negated_views() -> None:
    """torch resolves them for functional and out forms; a writing op reads them, and refuses to write into one."""
    infini, x = torch.ops.infini, torch.randn(4, 8)
    negated = torch._neg_view(x)
    assert torch.equal(infini.relu(negated), torch.relu(-x))
    out = torch._neg_view(torch.zeros(4, 8))
    infini.relu.out(x, out=out)
    assert torch.equal(out, torch.relu(x))
    with pytest.raises(RuntimeError, match=r"^infini::relu: x must hold its own values, .*\.resolve_neg\(\)"):
        infini.relu_(negated)
    caches = torch.zeros(2, 1, 1, 4, 8)
    k, v, slots = torch._neg_view(torch.ones(2, 1, 8)), torch._neg_view(torch.ones(2, 1, 8)), torch.tensor([1, 3])
    infini.paged_caching(*caches, k, v, slots)
    assert torch.equal(caches[:, 0, 0, :, 0], torch.tensor([[0.0, -1, 0, -1]] * 2))
    for refused in ([torch._neg_view(caches[0]), caches[1]], [caches[0], torch._neg_view(caches[1])]):
        before = caches.clone()
        with pytest.raises(RuntimeError, match="^infini::paged_caching: [kv]_cache must hold its own values"):
            infini.paged_caching(*refused, k * 7, v * 7, slots)
        assert torch.equal(caches, before)


@pytest.mark.parametrize("op", [torch.ops.infini.relu, torch.ops.infini.relu_])
@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.complex64, "complex64"), (torch.float8_e4m3fn, "float8_e4m3fn"), (torch.uint16, "uint16")],
)
def test_dtypes_that_no_op_serves_are_named(op: Any, dtype: torch.dtype, name: str) -> None:
    x = torch.zeros(2).to(dtype)
    with pytest.raises(RuntimeError, match=f"^infini::relu: x must be .*, got {name}$"):
        op(x.conj() if dtype.is_complex else x)


def test_out_of_memory_is_a_sentence() -> None:
    x = torch.ones(1).expand(1 << 45)
    message = r"^infini::relu: out of memory: a tensor of shape \[35184372088832\] in float32 takes 131072 GiB$"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.infini.relu(x)
