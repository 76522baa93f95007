"""The 248 functions that infinicore has beside torch: each against torch, eager and recorded; and what they refuse."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_infini.compat.infinicore as ic
from support.infinicore_samples import SAMPLES, Call, Values, call
from torch_infini.compat.infinicore._recording import SIZED_BY_VALUES, VIEWS
from torch_infini.compat.infinicore._rules import RULES
from torch_infini.compat.infinicore.lib import _infinicore as raw

F = ic.nn.functional
RANDOM = [name for name in SAMPLES if any(part in name for part in ("dropout", "fractional", "gumbel", "rrelu"))]
NOT_FILLED = {"empty_strided"}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def ours(name: str) -> Callable[..., Any]:
    return attrgetter(name)(ic)


def theirs(name: str) -> Callable[..., Any]:
    return attrgetter(name)(torch)


def mapped(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """The arguments or the result with what is of a type converted; tuples and named tuples become lists."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, dict):
        return {key: mapped(item, kind, convert) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [mapped(item, kind, convert) for item in value]
        return tuple(items) if isinstance(value, tuple) and kind is Tensor else items
    return value


def to_ours(value: Any) -> Any:
    return mapped(value, Tensor, ic.from_torch)


def to_torch(value: Any) -> Any:
    return mapped(value, ic.Tensor, torch.from_dlpack)


def run_ours(name: str, sample: Call) -> Any:
    torch.manual_seed(7)
    result = to_torch(ours(name)(*to_ours(sample.args), **to_ours(sample.kwargs)))
    return result, sample  # the arguments too: some calls overwrite them


def run_theirs(name: str, sample: Call) -> Any:
    torch.manual_seed(7)
    result = mapped(theirs(name)(*sample.args, **sample.kwargs), Tensor, lambda t: t.resolve_conj())
    return mapped(result, ic.Tensor, None), sample


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def check(name: str, found: Any, expected: Any, exact: bool = False) -> None:
    """Compare results; those of our kernels, unless `exact`, within what float32 sums of at most 100 terms allow."""
    found, expected = list(leaves(found)), list(leaves(expected))
    assert len(found) == len(expected)
    for mine, other in zip(found, expected):
        if not isinstance(other, Tensor):
            assert mine == other
            continue
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype), name
        if name in NOT_FILLED:
            assert mine.stride() == other.stride()
        elif name in RULES and not exact and other.dtype.is_floating_point:
            step = torch.finfo(other.dtype).eps
            torch.testing.assert_close(mine, other, rtol=100 * 2**-24 + step, atol=100 * 2**-24 + step, equal_nan=True)
        else:
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def strided(sample: Call) -> Call:
    """The same call on tensors whose elements lie apart and begin behind the start of their memory."""

    def spread(t: Tensor) -> Tensor:
        memory = torch.zeros([2 * n + 1 for n in t.shape], dtype=t.dtype)
        view = memory[tuple(slice(1, None, 2) for _ in t.shape)]
        return view.copy_(t)

    return Call(*mapped(tuple(sample), Tensor, spread))


def test_there_are_248_names() -> None:
    top = set(ic._aten.__all__) - {"backend_of"}
    functional = {f"nn.functional.{name}" for name in ic._aten_functional.__all__}
    assert top | functional == SAMPLES.keys()
    assert len(SAMPLES) == 248
    assert top < set(dir(ic)) and set(ic._aten_functional.__all__) < set(dir(F))
    assert top < set(ic.__all__) and set(ic._aten_functional.__all__) < set(F.__all__)


@pytest.mark.parametrize("name", SAMPLES)
def test_name(name: str) -> None:
    function = ours(name)
    assert (
        callable(function)
        and f"{function.__module__}.{function.__qualname__}" == f"torch_infini.compat.infinicore.{name}"
    )
    assert f"`torch.{name}`" in function.__doc__ and f"/torch.{name}.html" in function.__doc__
    try:
        expected = inspect.signature(theirs(name))
    except ValueError:
        return
    parameters = [p for p in expected.parameters if p != "out"]
    assert [p for p in inspect.signature(function).parameters if p != "out"] == parameters


@pytest.mark.parametrize("name", SAMPLES)
def test_against_torch(name: str) -> None:
    for make in SAMPLES[name]:
        check(name, run_ours(name, make(Values(1))), run_theirs(name, make(Values(1))))
        apart = lambda: strided(make(Values(2)))  # noqa: B023
        check(name, run_ours(name, apart()), run_theirs(name, apart()))


@contextmanager
def by_raw_module() -> Iterator[Any]:
    """A recording that notes no ops of torch: each call of a function is one op of its graph."""
    found = ic.graph.Graph(raw.Graph())
    raw.start_graph_recording()
    yield found
    found._graph = raw.stop_graph_recording()


@pytest.mark.parametrize("recording", [ic.graph, by_raw_module])
@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in SIZED_BY_VALUES])
def test_recorded(name: str, recording: Callable[[], Any]) -> None:
    """Replays on other values give the bits of eager calls; the recording itself reads and writes nothing."""
    for make in SAMPLES[name]:
        live = make(Values(1))
        tensors = [value for value in leaves(tuple(live)) if isinstance(value, Tensor)]
        before = [tensor.clone() for tensor in tensors]
        with recording() as graph:
            result = ours(name)(*to_ours(live.args), **to_ours(live.kwargs))
        check(name, tensors, before, exact=True)
        for seed in (2, 3):
            # Values of the arguments as they come; those that are no tensors stay.
            fresh = make(Values(seed))
            for tensor, value in zip(tensors, (v for v in leaves(tuple(fresh)) if isinstance(v, Tensor))):
                tensor.copy_(value)
            torch.manual_seed(7)
            graph.run()
            check(name, (to_torch(result), live), run_ours(name, fresh), exact=True)


@pytest.mark.parametrize("name", RANDOM)
def test_random_draws_anew(name: str) -> None:
    sample = SAMPLES[name][0](Values(1))
    sample = Call((sample.args[0].repeat(8, *[1] * (sample.args[0].dim() - 1)), *sample.args[1:]), sample.kwargs)
    with ic.graph() as graph:
        result = ours(name)(*to_ours(sample.args), **sample.kwargs)
    draws = []
    for _ in range(2):
        graph.run()
        draws.append(to_torch(result).clone())
    assert not torch.equal(*draws)


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_views(name: str) -> None:
    """Eager and recorded, views share the memory, and a graph has no op for them."""
    sample = SAMPLES[name][0](Values(1))
    source = ic.from_torch(sample.args[0])
    expected = list(leaves(theirs(name)(*sample.args, **sample.kwargs)))
    eager = ours(name)(source, *sample.args[1:], **sample.kwargs)
    with ic.graph() as graph:
        recorded = ours(name)(source, *sample.args[1:], **sample.kwargs)
        made = ic.add(source, source)
        of_made = ours(name)(made, *sample.args[1:], **sample.kwargs)
    assert "graph of 1 ops" in graph.report()
    for found in (eager, recorded):
        for mine, other in zip(leaves(found), expected, strict=True):
            assert (mine.data_ptr(), mine.shape, mine.stride()) == (
                other.data_ptr(),
                list(other.shape),
                list(other.stride()),
            )
    for view in leaves(of_made):
        with pytest.raises(RuntimeError, match="holds nothing before"):
            torch.from_dlpack(view)
    graph.run()
    check(name, to_torch(of_made), [2 * one for one in expected], exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted(RULES))
def test_our_kernels(name: str, dtype: torch.dtype) -> None:
    """Against float64, and called where backend_of() says so."""
    for index, make in enumerate(SAMPLES[name]):
        sample, exact = typed(make(Values(4)), dtype), typed(typed(make(Values(4)), dtype), torch.float64)
        with Called() as called:
            found = to_torch(ours(name)(*to_ours(sample.args), **to_ours(sample.kwargs)))
        if index == 0:
            served = "infini" if any(op.startswith("infini::") for op in called.names) else "torch"
            assert ic.backend_of(name, str(dtype).removeprefix("torch.")) == served, called.names
        expected = theirs(name)(*exact.args, **exact.kwargs)
        for mine, other in zip(leaves(found), leaves(expected), strict=True):
            # One rounding, and float32 sums of at most 100 positive terms.
            largest = max(1.0, other.abs().max().item()) if other.numel() else 1.0
            limit = max(2 * torch.finfo(dtype).eps, 100 * 2**-24) * largest
            torch.testing.assert_close(mine.to(other.dtype), other, rtol=0, atol=limit)


def typed(sample: Call, dtype: torch.dtype) -> Call:
    return Call(*mapped(tuple(sample), Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t))


class Called(TorchDispatchMode):
    """Notes the ops that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


# Calls at the edges of the rules, in the functions' order of arguments: ours or torch's kernels must do as torch does.
_G = Values(5)
EDGES: list[tuple[str, Call]] = [
    ("nn.functional.hardtanh", call(_G.signed(4), 2.0, 1.0)),
    ("nn.functional.hardtanh", call(_G.signed(4), -torch.inf, torch.inf)),
    ("nn.functional.hardtanh", call(torch.tensor([torch.nan, torch.inf, -torch.inf]))),
    ("nn.functional.relu6", call(_G.ints(-9, 9, 4))),
    ("nn.functional.softplus", call(_G.signed(2, 1).expand(2, 3), threshold=1)),
    ("nn.functional.softplus", call(_G(*[1] * 7, 2, 1))),  # nine dimensions
    ("nn.functional.log_softmax", call(_G(2, 3), 2)),
    ("nn.functional.log_softmax", call(torch.tensor(1.0), 0)),
    ("nn.functional.softmin", call(torch.full((2, 3), torch.inf), -1)),
    ("nn.functional.normalize", call(_G(2, 3) * 1e-6, eps=1e-3)),
    ("nn.functional.normalize", call((_G(2, 3) * 0.1).half(), eps=1.0)),
    ("nn.functional.normalize", call((_G(2, 3) + 1).half(), torch.inf)),
    ("nn.functional.normalize", call((_G(2, 3) + 1).half(), 0.5)),
    ("nn.functional.normalize", call((_G(2, 3) + 1).half(), 2, (0, 1))),
    ("nn.functional.scaled_dot_product_attention", call(*[_G(1, 2, 3, 4)] * 3, attn_mask=torch.zeros(3, 3).bool())),
    ("nn.functional.scaled_dot_product_attention", call(*[_G(1, 2, 3, 4)] * 3, attn_mask=_G(2, 3, 3))),
    ("nn.functional.scaled_dot_product_attention", call(*[_G(1, 2, 3, 8)[..., ::2]] * 3)),
    ("nn.functional.scaled_dot_product_attention", call(_G(1, 4, 3, 4), *[_G(1, 2, 3, 4)] * 2)),  # without enable_gqa
    ("nn.functional.conv1d", call(_G(2, 3, 7), _G(4, 3, 3), padding="valid")),
    ("nn.functional.conv1d", call(_G(0, 3, 7), _G(4, 3, 3))),
    ("nn.functional.conv1d", call(_G(2, 3, 2), _G(4, 3, 3))),
    ("nn.functional.conv2d", call(_G(2, 3, 7, 7), _G(4, 3, 3, 3), stride=0)),
    ("nn.functional.conv2d", call(_G(2, 3, 7, 7), _G(4, 3, 3, 3), padding=-1)),
    ("nn.functional.conv2d", call(_G(2, 3, 7, 7), _G(4, 3, 3))),
    ("addmv", call(torch.full((2,), torch.nan), _G(2, 3), _G(3), beta=0)),
    ("addmv", call(_G(3), _G(2, 3), _G(3))),
    ("addmv", call(_G(2), _G(2, 3), _G(3), alpha=torch.inf)),
    ("addmv", call(torch.tensor(1.0), _G(2, 0), _G(0))),
    ("addr", call(_G(2, 6)[:, ::2], _G(4)[::2], _G(3))),
    ("baddbmm", call(_G(5, 2, 4), _G(5, 2, 6)[..., ::2], _G(1, 3, 4).expand(5, 3, 4))),
    ("baddbmm", call(_G(5, 2, 4), _G(5, 2, 3), _G(4, 3, 4))),
    ("addbmm", call(_G(2, 4), _G(3, 5, 2).permute(1, 2, 0), _G(5, 4, 3).mT)),
    ("addbmm", call(torch.full((2, 4), torch.nan), _G(5, 2, 0), _G(5, 0, 4), beta=0)),
    ("inner", call(_G(3), torch.tensor(2.0))),
    ("inner", call(_G(2, 3), _G(2, 4))),
    ("mv", call(_G(3, 1).expand(3, 4), _G(8)[::2])),
    ("mv", call(_G(3, 4).double(), _G(4))),
    ("dot", call(_G(4), _G(5))),
    ("vdot", call(_G(1).expand(4), _G(4))),
    ("clone", call(_G(2, 3, 4, 5), memory_format=torch.channels_last)),
    ("clone", call(_G(4, 3).t())),
    ("clone", call(_G(2, 3), memory_format=torch.channels_last)),
]


@pytest.mark.parametrize(("name", "sample"), EDGES, ids=lambda value: value if isinstance(value, str) else "")
def test_edges_of_our_kernels(name: str, sample: Call) -> None:
    try:
        expected = theirs(name)(*sample.args, **sample.kwargs)
    except Exception as error:
        with pytest.raises(type(error), match=f"^infinicore.{name}: "):
            ours(name)(*to_ours(sample.args), **to_ours(sample.kwargs))
        return
    found = to_torch(ours(name)(*to_ours(sample.args), **to_ours(sample.kwargs)))
    check(name, found, expected)
    assert name != "clone" or found.stride() == expected.stride()


@pytest.mark.full
def test_calls_and_graphs_leave_no_memory_behind() -> None:
    x = ic.ones([1000], dtype=ic.float32, device="cpu")
    in_use = []
    for _ in range(3):
        for _ in range(50):
            with ic.graph() as graph:
                total = ic.sum(ic.split(ic.sqrt(x), 500)[1])
            graph.run()
            assert to_torch(ic.abs(total)).item() == 500
        del graph, total
        gc.collect()
        in_use.append(ic.context.memory_stats("cpu")["in_use"])
    assert in_use[0] == in_use[1] == in_use[2]


@pytest.mark.parametrize("name", sorted(SIZED_BY_VALUES))
def test_sizes_by_values_are_not_recorded(name: str) -> None:
    sample = SAMPLES[name][0](Values(1))
    with ic.graph() as graph:
        with pytest.raises(RuntimeError, match=f"infinicore.{name}: the size of its result depends on values.*call it"):
            ours(name)(*to_ours(sample.args))
        total = ic.sum(to_ours(sample.args[0]))
    graph.run()  # the recording went on
    assert torch.equal(to_torch(total), sample.args[0].sum())


@pytest.mark.parametrize(
    ("refused", "rule"),
    [
        (lambda x: ic.where(x), "infinicore.where: the size of its result depends on values"),
        (lambda x: F.one_hot(ic.full([2], 1)), "infinicore.nn.functional.one_hot: the size .* give num_classes"),
        (
            lambda x: F.triplet_margin_with_distance_loss(x, x, x, distance_function=lambda a, b: a),
            "triplet_margin_with_distance_loss: a graph cannot record a call of the function",
        ),
    ],
)
def test_refused_while_recording(refused: Callable[[Any], Any], rule: str) -> None:
    x = ic.from_torch(torch.ones(2, 3))
    with ic.graph(), pytest.raises(RuntimeError, match=rule):
        refused(x)


def test_callers_function() -> None:
    a, p, n = (Values(seed)(4, 3) for seed in (1, 2, 3))
    distance = lambda x, y: F.pairwise_distance(x, y, p=1.0)
    found = F.triplet_margin_with_distance_loss(*to_ours([a, p, n]), distance_function=distance)
    expected = torch.nn.functional.triplet_margin_with_distance_loss(
        a, p, n, distance_function=lambda x, y: torch.nn.functional.pairwise_distance(x, y, p=1.0)
    )
    assert torch.equal(to_torch(found), expected)


@pytest.mark.parametrize("recording", [None, ic.graph, by_raw_module])
def test_out(recording: Callable[[], Any] | None) -> None:
    x = Values(1)(4, 6)
    mine = ic.from_torch(x)
    total = ic.empty([6], dtype=ic.float64, device="cpu")
    largest = ic.empty([4], dtype=ic.float32, device="cpu"), ic.empty([4], dtype=ic.int64, device="cpu")
    scaled = ic.from_torch(torch.zeros(6, 4).t())
    graph = recording() if recording else None
    g = graph.__enter__() if graph else None
    assert ic.sum(mine, 0, out=total) is total
    assert ic.max(mine, 1, out=largest) is largest
    assert F.relu6(mine, out=scaled) is scaled
    assert ic.sqrt(mine, out=mine) is mine
    if graph and g:
        graph.__exit__(None, None, None)
        assert not to_torch(scaled).any()
        g.run()
    original = Values(1)(4, 6)
    assert torch.equal(to_torch(total), original.sum(0).double())
    assert torch.equal(to_torch(largest[0]), original.max(1).values)
    assert torch.equal(to_torch(largest[1]), original.max(1).indices)
    assert torch.equal(to_torch(scaled), original)
    assert torch.equal(x, original.sqrt())


@pytest.mark.parametrize("recording", [None, ic.graph, by_raw_module])
@pytest.mark.parametrize("name", ["all", "any", "amax", "amin", "logsumexp", "mean", "sum", "cumsum", "abs"])
def test_out_that_only_torch_can_write(name: str, recording: Callable[[], Any] | None) -> None:
    """bool for uint8, and elements that share memory, where the order of the writes counts."""
    x = Values(1)(4, 5)
    x[1] = 0
    layouts = [((4,), (1,)), ((4,), (0,))] if name not in ("cumsum", "abs") else [((4, 5), (2, 1)), ((4, 5), (5, 1))]
    args: tuple[int, ...] = () if name == "abs" else (1,)
    if name in ("all", "any"):
        x = x.abs().ceil().to(torch.uint8)
    for dtype in (torch.bool, x.dtype):
        for size, strides in layouts:
            expected, actual = (torch.zeros(24, dtype=dtype) for _ in "ab")
            try:
                theirs(name)(x, *args, out=expected.as_strided(size, strides))
            except RuntimeError:  # what torch refuses is refused, or, a cast that it has not, made
                continue
            out = ic.from_torch(actual.as_strided(size, strides))
            if recording:
                with recording() as g:
                    assert ours(name)(ic.from_torch(x), *args, out=out) is out
                g.run()
            else:
                assert ours(name)(ic.from_torch(x), *args, out=out) is out
            assert torch.equal(actual, expected), (dtype, strides)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["addbmm", "addmv", "addr", "baddbmm"])
def test_an_alpha_of_zero(name: str, dtype: torch.dtype) -> None:
    """Whether it hides a NaN of the product is torch's choice for each function and dtype."""
    shapes = {"addbmm": [(3, 3), (2, 3, 4), (2, 4, 3)], "addmv": [(3,), (3, 4), (4,)], "addr": [(3, 3), (3,), (3,)]}
    shapes["baddbmm"] = [(2, 3, 3), *shapes["addbmm"][1:]]
    c, *factors = (torch.ones(shape, dtype=dtype) for shape in shapes[name])
    factors[0].fill_(torch.nan)
    expected = theirs(name)(c, *factors, alpha=0)
    actual = to_torch(ours(name)(*to_ours([c, *factors]), alpha=0))
    assert torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.nan_to_num(), expected.nan_to_num())


def test_in_place() -> None:
    x = ic.from_torch(torch.tensor([-1.0, 3.0, 9.0]))
    assert F.relu6(x, inplace=True) is x
    assert to_torch(x).tolist() == [0, 3, 6]
    with ic.graph() as graph:
        assert F.threshold(x, 4, -1, inplace=True) is x
    assert to_torch(x).tolist() == [0, 3, 6]
    graph.run()
    assert to_torch(x).tolist() == [-1, -1, 6]


def test_results_of_several_tensors() -> None:
    x = Values(1)(4, 6)
    found = ic.max(ic.from_torch(x), dim=1)
    assert isinstance(found, torch.return_types.max) and isinstance(found.indices, ic.Tensor)
    assert torch.equal(to_torch(found.values), x.max(1).values)
    parts = ic.split(ic.from_torch(x), 3, 1)
    assert type(parts) is tuple and [part.shape for part in parts] == [[4, 3], [4, 3]]


def test_dtypes_and_devices_of_infinicore() -> None:
    made = ic.full([2], 3, dtype=ic.bfloat16, device=ic.device("cpu"))
    assert made.dtype == ic.bfloat16 and made.device == ic.device("cpu")
    assert ic.sum(made, dtype=ic.float64).dtype == ic.float64
    assert ic.full([2], 3, dtype=ic.int32, device="cpu:0").dtype == ic.int32


def test_views_keep_their_memory() -> None:
    view = ic.select(ic.add(*[ic.ones([1000, 1000], dtype=ic.float32, device="cpu")] * 2), 0, 999)
    others = [ic.zeros([1000, 1000], dtype=ic.float32, device="cpu") for _ in range(4)]
    assert to_torch(view).eq(2).all() and len(others) == 4


def test_results_of_recordings_hold_nothing_yet() -> None:
    x = ic.from_torch(torch.ones(3))
    with ic.graph() as graph:
        y = ic.square(x)
    with pytest.raises(RuntimeError, match="infinicore.abs: a tensor that was made while a graph was recorded"):
        ic.abs(y)
    graph.run()
    assert torch.equal(to_torch(ic.abs(y)), torch.ones(3))


def test_inputs_of_a_recording_live_as_long_as_it() -> None:
    with ic.graph() as graph:
        result = ic.sqrt(ic.from_torch(torch.full((1000,), 4.0)))
    junk = [torch.zeros(1000) for _ in range(50)]
    graph.run()
    assert to_torch(result).eq(2).all() and len(junk) == 50


@pytest.mark.parametrize(
    ("wrong", "kind", "rule"),
    [
        (lambda x: ic.abs([1]), TypeError, r"infinicore.abs: .*must be Tensor, not list"),
        (lambda x: ic.abs(torch.ones(2)), TypeError, r"infinicore.abs: tensors must be infinicore.Tensor.*from_torch"),
        (lambda x: F.relu6([1.0]), TypeError, r"relu6: input must be an infinicore.Tensor, got \[1.0\]"),
        (lambda x: F.mse_loss(x, target=3), TypeError, r"mse_loss: target must be an infinicore.Tensor, got 3"),
        (lambda x: F.max_pool2d(None, 2), TypeError, r"infinicore.nn.functional.max_pool2d: "),
        (lambda x: ic.sum(x, 5), IndexError, r"infinicore.sum: Dimension out of range"),
        (lambda x: ic.inverse(x), RuntimeError, r"infinicore.inverse: "),
        (lambda x: ic.mv(x, x), RuntimeError, r"infinicore.mv: "),
        (lambda x: ic.dot(x, x), RuntimeError, r"infinicore.dot: "),
        (lambda x: F.conv2d(x, x), RuntimeError, r"infinicore.nn.functional.conv2d: "),
        (lambda x: ic.abs(x, no_such=1), TypeError, r"infinicore.abs: "),
        (lambda x: ic.abs(x, out=3), TypeError, r"infinicore.abs: out must be an infinicore.Tensor.*got 3"),
        (lambda x: ic.abs(x, out=()), TypeError, r"infinicore.abs: out must be"),
        (lambda x: ic.sum(x, 0, out=x), ValueError, r"infinicore.sum: out must have the shape .*\[3\], got \[2, 3\]"),
        (lambda x: ic.max(x, 0, out=x), TypeError, r"infinicore.max: out must be as many tensors .* 2, got 1"),
        (
            lambda x: ic.sqrt(x, out=ic.empty([2, 3], dtype=ic.int32, device="cpu")),
            TypeError,
            r"infinicore.sqrt: out must have a dtype that takes the result's, torch.float32, got infinicore.int32",
        ),
    ],
)
@pytest.mark.parametrize("recorded", [False, True])
def test_errors(wrong: Callable[[Any], Any], kind: type[Exception], rule: str, recorded: bool) -> None:
    x = ic.from_torch(torch.ones(2, 3))
    if recorded:
        with ic.graph(), pytest.raises(kind, match=rule):
            wrong(x)
    else:
        with pytest.raises(kind, match=rule):
            wrong(x)


def test_backend_of() -> None:
    assert ic.backend_of("abs") == "torch"
    assert ic.backend_of("infinicore.nn.functional.conv2d", ic.bfloat16, ic.device("cpu")) == "infini"
    assert ic.backend_of("nn.functional.conv2d", "float64") == "torch"
    assert ic.backend_of("clone", "int64") == "infini"
    assert {name for name in SAMPLES if ic.backend_of(name) == "infini"} == RULES.keys() - {"nn.functional.normalize"}
    assert {name for name in SAMPLES if ic.backend_of(name, "float16") == "infini"} == RULES.keys()
    for name in ("matmul", "nn.functional.rope", "empty", "nn.Linear", "Tensor", "context.get_stream"):
        assert ic.backend_of(name) == "infini"
    with pytest.raises(ValueError, match=r"there is no infinicore.nn.functional.conv4d: did you mean .*conv2d"):
        ic.backend_of("nn.functional.conv4d")
    with pytest.raises(ValueError, match="matmul takes float32, bfloat16, float16, got int32"):
        ic.backend_of("matmul", "int32")
    with pytest.raises(ValueError, match="dtype must be"):
        ic.backend_of("abs", "float33")
    with pytest.raises(ValueError, match="abs needs a CPU or a CUDA device, got mlu"):
        ic.backend_of("abs", device="mlu")


def test_every_name_of_the_package_has_a_backend() -> None:
    for name in ic.__all__:
        assert ic.backend_of(name) in ("infini", "torch"), name
    for name in F.__all__:
        assert ic.backend_of(f"nn.functional.{name}") in ("infini", "torch"), name
