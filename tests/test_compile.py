"""torch.compile(model, backend="infini"): what it finds in unmodified models, how exact it is, and what it leaves.

Six families in three dtypes with static and dynamic shapes, two also where the second shape makes them dynamic; then
single formulas, written in the ways that must be found and in those that must not. Where Inductor adds nothing to the
question, the changed graph runs as it is.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from support.rounding import assert_same_but_rounding, sums_of
from torch_infini import compile as infini_compile
from torch_infini.ops import OpSpec, all_ops
from torch_infini.ops._registry import torch_release
from torch_infini.testing.families import FAMILIES, LAYERS, Family, errors_of, tokens

pytest.importorskip("transformers")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = {"static": False, "automatic": None, "dynamic": True}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class Replaced:
    """A backend that replaces patterns and runs the graph as it then is; keeps the reports."""

    def __init__(self, *patterns: str) -> None:
        self.patterns = patterns or infini_compile.PATTERN_NAMES
        self.reports: list[infini_compile.Report] = []

    def __call__(self, graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.reports.append(infini_compile.replace_patterns(graph_module, self.patterns))
        return graph_module.forward


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def check_report(family: Family, report: infini_compile.Report | None) -> None:
    assert report is not None and report.skipped is None
    assert dict(report.found) == family.sites
    assert dict(report.replaced) == family.sites and not report.left


def check_exactness(model: nn.Module, ids: Tensor, actual: Tensor) -> None:
    """No further from float64 than eager, and no further from eager than the two errors together allow."""
    errors = errors_of(actual, logits(model, ids), logits(copy.deepcopy(model).double(), ids))
    assert errors.compiled <= 1.1 * errors.eager
    assert errors.between <= 1.5 * errors.eager


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda f: f.name)
def built(request: pytest.FixtureRequest) -> tuple[Family, nn.Module]:
    return request.param, request.param.build()


@pytest.mark.full(beyond=7)
@pytest.mark.parametrize(
    ("precision", "mode"),
    [("float", "static"), pytest.param("half", "static", marks=pytest.mark.full), ("other half", "dynamic")],
)
def test_families(built: tuple[Family, nn.Module], precision: str, mode: str) -> None:
    """Every site is found and replaced; dynamic: sizes are symbols. One half is static, the other dynamic, in turns."""
    halves = DTYPES[1:] if FAMILIES.index(built[0]) % 2 else DTYPES[:0:-1]
    dtype = {"float": torch.float32, "half": halves[0], "other half": halves[1]}[precision]
    check_family(*built, dtype, mode)


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize(("number", "dtype"), [(0, torch.float32), (4, torch.bfloat16)], ids=["Llama", "Gemma 2"])
def test_families_that_become_dynamic(number: int, dtype: torch.dtype) -> None:
    """When the second shape comes. What becomes of it is torch's decision: two families show what we make of both."""
    check_family(FAMILIES[number], FAMILIES[number].build(), dtype, "automatic")


def check_family(family: Family, model: nn.Module, dtype: torch.dtype, mode: str) -> None:
    model = copy.deepcopy(model).to(dtype)
    backend = Replaced()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=MODES[mode])
    for length in (24, 17, 9)[: 1 if mode == "static" else 3]:
        ids = tokens(2, length)
        check_exactness(model, ids, logits(compiled, ids))
    assert len(backend.reports) == {"static": 1, "automatic": 2, "dynamic": 1}[mode]
    for report in backend.reports:
        check_report(family, report)


@pytest.mark.full
def test_inductor(built: tuple[Family, nn.Module]) -> None:
    """The backend by its name, through Inductor."""
    family, model = built
    model = copy.deepcopy(model).bfloat16()
    ids = tokens(2, 24)
    actual = logits(torch.compile(model, backend="infini", fullgraph=True, dynamic=False), ids)
    check_report(family, infini_compile.last_report())
    check_exactness(model, ids, actual)


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("mode", ["automatic", "dynamic"])
def test_graphs_breaks_and_clones(mode: str) -> None:
    """A LLaMA: one graph (two where the second shape makes it dynamic: the first is static), no break, no clone."""
    model = FAMILIES[0].build().bfloat16()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="infini", dynamic=MODES[mode])
    _, codes = run_and_get_code(lambda: [logits(compiled, tokens(1, length)) for length in (24, 17, 9)])
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if mode == "automatic" else 1)
    assert len(codes) == (2 if mode == "automatic" else 1)
    for code in codes:
        calls = Counter(re.findall(r"torch\.ops\.infini\.(\w+\.\w+)\(", code))
        # The out forms, on buffers that Inductor planned; only what has two results allocates them itself.
        assert calls == {
            "add_rms_norm.default": 2 * LAYERS,
            "attention.out": LAYERS,
            "linear.out": 7 * LAYERS + 1,
            "rms_norm.out": 1,
            "rope.out": 2 * LAYERS,
            "swiglu.out": LAYERS,
        }
        assert clones(code) == []


def clones(code: str) -> list[str]:
    """Calls and kernels of generated code that copy a tensor."""
    return re.findall(r"aten\.clone|\w*fused_\w*clone\w*|aten\.copy_|\w*fused_copy\w*", code)


def test_clones_are_seen() -> None:
    """The search above finds the copy that a transposed tensor needs."""
    function = torch.compile(lambda x: x.transpose(0, 1).contiguous())
    _, code = run_and_get_code(function, torch.randn(33, 65))
    assert clones(code[0])


# ---- single formulas ----


def run(function: Callable[..., Any], *args: Any, patterns: tuple[str, ...] = ()) -> infini_compile.Report:
    """The report for a function; its result must be the function's own."""
    backend = Replaced(*patterns)
    copies = [copy.deepcopy(a) for a in args]
    with torch.no_grad():
        expected = function(*copies)
        actual = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(args, tuple(copies))
    (report,) = backend.reports
    return report


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, 64, generator=g).to(dtype), (1 + torch.rand(64, generator=g)).to(dtype)


def root(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


NORMS = {
    "llama": lambda x, w: w * (x.float() * root(x.float())).to(x.dtype),
    "llama, functions": lambda x, w: torch.mul(
        torch.mul(
            x.float(), torch.rsqrt(torch.add(torch.mean(torch.square(x.float()), dim=-1, keepdim=True), 1e-5))
        ).to(dtype=x.dtype),
        w,
    ),
    "once": lambda x, w: (w * (x.float() * root(x.float()))).to(x.dtype),
    "once, float weight": lambda x, w: (w.float() * (x.to(torch.float32) * root(x.to(torch.float32)))).type_as(x),
    "gemma": lambda x, w: (x.float() * root(x.float()) * (1.0 + w.float())).type_as(x),
    "a root by power": lambda x, w: w * (x.float() * (x.float() ** 2).mean(-1, True).add(1e-5).pow(-0.5)).to(x.dtype),
    "a product": lambda x, w: w * (x.float() * torch.rsqrt((x.float() * x.float()).mean(2, True) + 1e-5)).to(x.dtype),
    "names": lambda x, w: torch.mul(
        input=w,
        other=torch.mul(
            input=x.float(),
            other=torch.rsqrt(
                input=torch.mean(input=torch.pow(input=x.float(), exponent=2), dim=-1, keepdim=True) + 1e-5
            ),
        ).to(x.dtype),
    ),
    "torch's function": lambda x, w: F.rms_norm(x, (64,), w, 1e-5),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(name: str, dtype: torch.dtype) -> None:
    def once_cast(x: Tensor, w: Tensor) -> Tensor:
        return NORMS[name](x, w)

    report = run(once_cast, *inputs(dtype))
    assert report.replaced == {"rms_norm": 1}, report


def test_float_weight_of_a_half_input() -> None:
    x, w = inputs()
    report = run(lambda x, w: w * (x.float() * root(x.float())).to(x.dtype), x, w.float())
    assert report.replaced == {"rms_norm": 1}, report


def test_residual_addition_is_joined_and_its_other_users_see_the_sum() -> None:
    def layer(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        h = x + y
        return NORMS["llama"](h, w), h * 2

    x, w = inputs()
    assert run(layer, x, x.flip(0), w).replaced == {"add_rms_norm": 1}
    assert run(layer, x, x.flip(0), w, patterns=("rms_norm",)).replaced == {"rms_norm": 1}


def broadcast_addition(x: Tensor, w: Tensor) -> Tensor:
    return NORMS["llama"](x + w, w)


def test_a_broadcast_addition_is_not_joined() -> None:
    assert run(broadcast_addition, *inputs()).replaced == {"rms_norm": 1}


NO_NORMS = {
    "no weight": lambda x, w: (x.float() * root(x.float())).to(x.dtype) + w,
    "another dimension": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)),
    "a third power": lambda x, w: w * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5)),
    "an eps for each row": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + x[..., :1].abs())),
    "two plus weight": lambda x, w: x * root(x) * (2.0 + w),
    "the root of another tensor": lambda x, w: w * (x * root(x + 1)),
    "a matrix of weights": lambda x, w: (w * torch.ones(5, 1)) * (x * root(x)),
    "torch's function over two dimensions": lambda x, w: F.rms_norm(x, (5, 64), w.expand(5, 64), 1e-5),
    "float64": lambda x, w: w.double() * (x.double() * root(x.double())),
}


@pytest.mark.parametrize("name", NO_NORMS)
def test_what_is_no_norm_stays(name: str) -> None:
    assert not run(NO_NORMS[name], *inputs(torch.float32)).replaced


def test_an_input_that_is_overwritten_meanwhile_stays() -> None:
    def norm(x: Tensor, w: Tensor) -> Tensor:
        scale = root(x)
        normalized = x * scale
        x.add_(1)  # from here on x is no longer what was normalized
        return w * normalized

    def view(x: Tensor, w: Tensor) -> Tensor:
        normalized = x * root(x)
        x[0].mul_(2)
        return w * normalized

    def gate(x: Tensor, y: Tensor) -> Tensor:
        activated = F.silu(x)
        x.zero_()
        return activated * y

    x, w = inputs(torch.float32)
    for function, args in ((norm, (x, w)), (view, (x, w)), (gate, (x, x + 1))):
        report = run(function, *args)
        assert not report.replaced and "overwritten" in str(report), report


GATES = {
    "function": lambda x, y: F.silu(x) * y,
    "product": lambda x, y: y * (x * torch.sigmoid(x)),
    "halves": lambda x, y: F.silu(torch.cat((x, y), -1).chunk(2, -1)[0]) * torch.cat((x, y), -1).chunk(2, -1)[1],
}


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str) -> None:
    x, _ = inputs()
    assert run(GATES[name], x, x.flip(0)).replaced == {"swiglu": 1}


def test_gates_by_gelu() -> None:
    x, _ = inputs()
    for function in (
        lambda x, y: F.gelu(x, approximate="tanh") * y,
        lambda x, y: y * F.gelu(input=x, approximate="tanh"),
    ):
        assert run(function, x, x.flip(0)).replaced == {"geglu": 1}


def test_what_is_no_gate_stays() -> None:
    x, w = inputs()
    for function in (
        lambda x, w: F.silu(x) * w,  # broadcast
        lambda x, w: F.silu(x) * F.silu(x).float(),  # two dtypes
        lambda x, w: F.gelu(x) * (x + 1),  # not the approximation
    ):
        assert not run(function, x, w).replaced


def rotated(x: Tensor, cos: Tensor, sin: Tensor, dim: int = 1) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos.unsqueeze(dim) + turned * sin.unsqueeze(dim)


def angles(positions: Tensor, columns: int, equal: bool = True) -> tuple[Tensor, Tensor]:
    f = positions[..., None].float() * 10000 ** (-torch.arange(columns // 2) / (columns // 2))
    both = torch.cat((f, f if equal else f * 2), -1)
    return both.cos(), both.sin()


def test_rotary_embeddings() -> None:
    x, positions = torch.randn(2, 3, 7, 16), torch.arange(7)[None]
    for function in (
        lambda x, p: rotated(x, *angles(p, 16)),
        lambda x, p: rotated(x.transpose(1, 2).contiguous(), *angles(p, 16), dim=2),
        lambda x, p: torch.cat((rotated(x[..., :8], *angles(p, 8)), x[..., 8:]), -1),
    ):
        assert run(function, x, positions).replaced == {"rope": 1}
    for function, reason in (
        (lambda x, p: rotated(x, *angles(p, 16, equal=False)), "halves"),
        (lambda x, p: rotated(x, *[t.half().float() + 0.0 for t in angles(p, 16)]), "halves"),
        (lambda x, p: rotated(x.double(), *angles(p, 16)), "float64"),
    ):
        report = run(function, x, positions)
        assert not report.replaced and reason in str(report), report


def test_attention() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 16, generator=g) for h in (4, 2, 2))
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    sdpa = F.scaled_dot_product_attention

    def repeat(x: Tensor) -> Tensor:
        b, h, t, d = x.shape
        return x[:, :, None].expand(b, h, 2, t, d).reshape(b, h * 2, t, d)

    def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, repeat(k).transpose(2, 3)) * 0.25 + torch.where(mask, 0.0, -1e9)
        return F.dropout(F.softmax(scores, -1, dtype=torch.float32).to(q.dtype), 0.0) @ repeat(v)

    for function in (
        lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True),
        lambda q, k, v: sdpa(q, repeat(k), repeat(v), mask, scale=0.5),
        lambda q, k, v: sdpa(q, repeat(k), repeat(v), mask[None, None].expand(2, 4, 9, 9)),
        written_out,
    ):
        assert run(function, q, k, v).replaced == {"attention": 1}
    # torch's causal mask begins at the first key, the kernel's ends at the last.
    report = run(lambda q, k, v: sdpa(q[:, :, :5], k, v, is_causal=True, enable_gqa=True), q, k, v)
    assert not report.replaced and "causal" in str(report)


CAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "Gemma 2": lambda scores: torch.tanh(scores * 0.25 / 2.0) * 2.0,
    "one factor": lambda scores: (scores * 0.125).tanh() * 2.0,
    "divided last": lambda scores: torch.tanh(input=scores / 8) / 0.5,
    "no factor": lambda scores: torch.tanh(scores * 0.25),
    "negative scale": lambda scores: torch.tanh(scores * -0.25) * 2.0,
}
NO_CAPS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "negative": (lambda scores: torch.tanh(scores * 0.25) * -2.0, "its softcap is not positive and finite"),
    "zero": (lambda scores: torch.tanh(scores * 0.25) * 0.0, "its softcap is not positive and finite"),
    "infinite scale": (lambda scores: torch.tanh(scores * 1e39) * 2.0, "its scale"),
    "division by zero": (lambda scores: torch.tanh(scores / 0.0) * 2.0, "its scale"),
    "capped twice": (lambda scores: scores.tanh().tanh(), ""),
    "added inside": (lambda scores: torch.tanh(scores + 1.0) * 2.0, ""),
}


def capped_attention(cap: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 9, 16, generator=g) for _ in range(3))
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)
    return lambda q, k, v, m: F.softmax(cap(q @ k.transpose(2, 3)) + m, -1) @ v, (q, k, v, mask[None, None])


@pytest.mark.parametrize("name", CAPS)
def test_attention_with_a_soft_cap(name: str) -> None:
    function, arguments = capped_attention(CAPS[name])
    assert run(function, *arguments).replaced == {"attention": 1}


@pytest.mark.parametrize("name", NO_CAPS)
def test_attention_with_another_cap_stays(name: str) -> None:
    cap, reason = NO_CAPS[name]
    function, arguments = capped_attention(cap)
    report = run(function, *arguments, patterns=("attention",))
    assert not report.replaced and reason in str(report), report


def test_linear() -> None:
    x, _ = inputs()
    weight, bias = torch.randn(32, 64).bfloat16(), torch.randn(32).bfloat16()
    assert run(F.linear, x, weight, bias).replaced == {"linear": 1}
    assert not run(lambda x, w: F.linear(x.transpose(1, 2), w), x, torch.randn(8, 5).bfloat16()).replaced
    assert run(F.linear, x, weight, patterns=("swiglu",)).left == [("linear", "it was not requested")]


def test_arguments_by_name_of_what_stays() -> None:
    """No spelling of a call breaks the search."""
    x, _ = inputs(torch.float32)
    for function in (
        lambda x: torch.cat(tensors=(-x[..., 32:], x[..., :32]), dim=-1) * 2 + x * 3,
        lambda x: F.softmax(input=x @ x.transpose(dim0=1, dim1=2), dim=-1) @ x,
        lambda x: torch.add(x, other=x, alpha=2).mul(other=3),
        lambda x: torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1e-2, alpha=100)) * x * x[0, 0],
        lambda x: torch.softmax(x.matmul(other=x.transpose(1, 2)), dim=-1).pow(exponent=2),
    ):
        assert not run(function, x).replaced


# ---- the door ----


def test_gradients_leave_the_graph_alone() -> None:
    model = nn.Linear(8, 8)
    compiled = torch.compile(model, backend="infini")
    compiled(torch.randn(2, 8)).sum().backward()
    report = infini_compile.last_report()
    assert model.weight.grad is not None
    assert report is not None and "gradient" in str(report)


def test_options_and_log(caplog: pytest.LogCaptureFixture) -> None:
    x, w = inputs()
    with caplog.at_level(logging.INFO, "torch_infini.compile"), torch.no_grad():
        options = {"patterns": ("swiglu",), "epilogue_fusion": False}
        compiled = torch.compile(NORMS["llama"], backend="infini", options=options)
        compiled(x, w)
    assert caplog.messages == ["backend infini: rms_norm: 0 of 1 replaced; rms_norm: 1 left: it was not requested"]
    for wrong, said in (({"patterns": ("rope", "norm")}, "'norm'"), ({"decompose": ("attention",)}, "'attention'")):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=f"torch_infini.compile: .* got {said}"), torch.no_grad():
            torch.compile(NORMS["llama"], backend="infini", options=wrong)(x, w)


def test_light_ops_fuse() -> None:
    """Ops that a user calls become aten ops, and with these one kernel; with decompose=() they stay calls."""

    def function(x: Tensor) -> Tensor:
        return torch.ops.infini.relu(torch.ops.infini.add(x, x)) * 2

    x, _ = inputs()
    for options, calls in (({}, 0), ({"decompose": ()}, 2), ({"decompose": ("relu",)}, 1)):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="infini", fullgraph=True, options=options)
        actual, (code,) = run_and_get_code(compiled, x)
        assert len(re.findall(r"torch\.ops\.infini\.\w+\.out\(", code)) == calls
        torch.testing.assert_close(actual, function(x))


@pytest.mark.parametrize("static", [False, True], ids=["growing cache", "static cache"])
def test_decode(static: bool) -> None:
    """A prompt and some steps after it: caches are written where eager writes them, and read in full."""
    from transformers import DynamicCache, StaticCache

    model = FAMILIES[0].build()
    backend = Replaced()
    compiled = torch.compile(model, backend=backend)
    prompt = tokens(2, 8)

    def caches() -> Any:
        if not static:
            return DynamicCache(config=model.config)
        cache = StaticCache(config=model.config, max_cache_len=16)
        cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
        return cache

    results = []
    for call in (model, compiled):
        cache, ids, steps = caches(), prompt, []
        with torch.no_grad():
            for _ in range(5):
                steps.append(call(input_ids=ids, past_key_values=cache, use_cache=True).logits)
                ids = steps[-1][:, -1].argmax(-1, keepdim=True)
        results.append((steps, cache.layers[1].keys))
    (eager, eager_keys), (actual, keys) = results
    for got, want in zip(actual, eager, strict=True):
        assert_same_but_rounding(got, want, *sums_of(model.config))
    assert_same_but_rounding(keys, eager_keys, *sums_of(model.config))
    for report in backend.reports:
        check_report(FAMILIES[0], report)


@pytest.mark.parametrize("spec", [spec for spec in all_ops() if not spec.mutates], ids=lambda spec: spec.name)
def test_inductor_plans_single_results(spec: OpSpec) -> None:
    """By a tag of the out variant, from torch 2.14 on; of several results, an unused one would have no buffer."""
    assert (torch.Tag.out in spec.out.tags) == (spec.outputs == 1 and torch_release() >= (2, 14))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["inductor", "infini"])
def test_a_result_that_is_not_used(backend: str) -> None:
    """The last norm of a model: its new residual is dropped."""
    x, w = inputs()

    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.ops.infini.add_rms_norm(x, y, w, 1e-6)[0] * 2

    with torch.no_grad():
        actual = torch.compile(function, backend=backend, fullgraph=True)(x, x + 1, w)
    torch.testing.assert_close(actual, function(x, x + 1, w))
