"""infinicore's ops: every sample of the C operators against float64, in both forms; the raw module; refusals."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

import torch_infini.compat.infinicore as ic
from support.c_checks import bits, check
from support.infinicore_calls import CALLS, OPS, RESULTS, F, copies, is_written, samples
from torch_infini.compat.infinicore.lib import _infinicore as raw
from torch_infini.testing import as_tuple
from torch_infini.testing.c_ops import CSample, clone


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def ours(*shape: int, dtype: torch.dtype = torch.float32) -> ic.Tensor:
    return ic.from_torch(t(*shape, dtype=dtype))


def test_every_operator_is_there() -> None:
    assert OPS.keys() == CALLS.keys()
    assert all(len(list(samples(op))) > 20 for op in OPS.values())


@pytest.mark.parametrize("name", CALLS)
def test_out(name: str) -> None:
    """Into `out`, every sample of the C operator: odd, empty, strided, broadcast and large ones, every dtype."""
    for sample in samples(OPS[name]):
        before = clone(sample.args)
        after, given = copies(sample)
        CALLS[name](given)
        check(OPS[name], sample, before, after)


@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str) -> None:
    """Without `out`, the same bits in a new contiguous tensor of the shape and dtype that `out` has by default."""
    op, compared = OPS[name], 0
    for sample in filter(is_written, samples(op)):
        after, given = copies(sample)
        CALLS[name](given)
        expected = [after[key] for key in op.outputs if name != "Attention" or key == "out"]
        _, again = copies(sample)
        made = as_tuple(RESULTS[name](again))
        for got, want in zip(made, expected, strict=True):
            assert got.is_contiguous(), sample.name
            assert got.shape == list(want.shape), sample.name
            if name == "RandomSample":
                assert got.dtype == ic.int32
                assert int(torch.from_dlpack(got)) == int(want), sample.name
                continue
            if torch.from_dlpack(got).dtype == want.dtype:
                compared += 1
                assert torch.equal(bits(torch.from_dlpack(got)), bits(want)), sample.name
    assert compared > 10 or name == "RandomSample"


def test_in_place_of_an_argument() -> None:
    """`out` may be an input where the op says so."""
    x, other = t(5, 70), t(5, 70)
    a = ic.from_torch(x.clone())
    assert ic.add(a, ic.from_torch(other), out=a) is a
    assert torch.equal(torch.from_dlpack(a), x + other)
    a += ic.from_torch(other)
    assert torch.equal(torch.from_dlpack(a), x + other + other)
    b = ic.from_torch(x.clone())
    assert F.silu(b, inplace=True) is b
    assert torch.equal(torch.from_dlpack(b), torch.from_dlpack(F.silu(ic.from_torch(x))))


def test_operators_of_tensors() -> None:
    a, b = ours(6, 9), ours(6, 9)
    same = lambda x, y: torch.equal(torch.from_dlpack(x), torch.from_dlpack(y))  # noqa: E731
    assert same(a + b, ic.add(a, b))
    assert same(a * b, ic.mul(a, b))
    c = b.permute([1, 0])
    assert same(a @ c, ic.matmul(a, c))
    for wrong in (lambda: a + 1, lambda: a * 2.0, lambda: a @ None):
        with pytest.raises(TypeError, match="unsupported operand"):
            wrong()


def test_swiglu_gates_with_the_second_argument() -> None:
    up, gate = t(4, 33), t(4, 33) + 1
    got = torch.from_dlpack(F.swiglu(ic.from_torch(up), ic.from_torch(gate)))
    torch.testing.assert_close(got, up * torch.nn.functional.silu(gate))


def test_rope_takes_sin_before_cos() -> None:
    """By the formula, with tables that differ; the default pairs columns that are half a head apart."""
    x, sin, cos = t(5, 2, 8), t(9, 4), t(9, 4)
    at = torch.tensor([8, 0, 3, 3, 1])
    first, second = x[..., :4], x[..., 4:]
    s, c = sin[at][:, None], cos[at][:, None]
    expected = torch.cat((first * c - second * s, second * c + first * s), -1)
    for dtype in (torch.int64, torch.int32):
        got = F.rope(*map(ic.from_torch, (x, at.to(dtype), sin, cos)))
        torch.testing.assert_close(torch.from_dlpack(got), expected)
    pairs = F.rope(*map(ic.from_torch, (x, at, sin, cos)), F.RopeAlgo.GPT_J)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2)
    torch.testing.assert_close(torch.from_dlpack(pairs), turned)


def test_rope_of_a_batch() -> None:
    x, sin, cos = t(2, 5, 3, 8), t(9, 4), t(9, 4)
    at = torch.tensor([[8, 0, 3, 3, 1], [2, 2, 7, 6, 5]])
    got = torch.from_dlpack(F.rope(*map(ic.from_torch, (x, at, sin, cos))))
    for entry in range(2):
        alone = F.rope(*map(ic.from_torch, (x[entry], at[entry], sin, cos)))
        assert torch.equal(got[entry], torch.from_dlpack(alone))


def test_paged_attention_prefill_takes_total_lengths() -> None:
    """Its fifth argument has the new tokens in it, against torch in float64."""
    old, new, heads, size, block = 6, 3, 2, 16, 4
    keys, values, q = t(old + new, heads, size), t(old + new, heads, size) * 2, t(new, heads, size)
    caches = [torch.zeros(3, heads, block, size) for _ in range(2)]
    slots = torch.arange(old + new)
    ic.paged_caching(*map(ic.from_torch, (*caches, keys, values, slots)))
    tables, total, starts = torch.tensor([[0, 1, 2]]), torch.tensor([old + new]), torch.tensor([0, new])
    got = ic.paged_attention_prefill(*map(ic.from_torch, (q, *caches, tables, total, starts)), None, size**-0.5)
    mask = torch.arange(old + new)[None] <= torch.arange(new)[:, None] + old
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in (q, keys, values)), attn_mask=mask
    ).transpose(0, 1)
    torch.testing.assert_close(torch.from_dlpack(got).double(), expected, rtol=1e-5, atol=1e-5)


def test_paged_caching_returns_its_caches() -> None:
    k_cache, v_cache = ours(2, 1, 4, 8), ours(2, 1, 4, 8)
    back = ic.paged_caching(k_cache, v_cache, ours(1, 1, 8), ours(1, 1, 8), ic.from_torch(torch.tensor([3])))
    assert back == (k_cache, v_cache)


def test_views() -> None:
    x = ours(4, 1, 6)
    assert ic.narrow(x, 2, 1, 3).shape == [4, 1, 3]
    assert ic.narrow(x, 2, 1, 3).data_ptr() == x.data_ptr() + 4
    assert ic.squeeze(x, 1).shape == [4, 6]
    assert ic.unsqueeze(x, 0).shape == [1, 4, 1, 6]
    with pytest.raises(RuntimeError, match="narrow"):
        ic.narrow(x, 2, 4, 3)
    with pytest.raises(RuntimeError, match="squeeze"):
        ic.squeeze(x, 0)


def test_rearrange_ignores_its_second_argument() -> None:
    x = ic.from_torch(t(4, 6).t())
    for made in (ic.rearrange(x), ic.rearrange(x, None), ic.rearrange(x, x)):
        assert made.is_contiguous()
        assert torch.equal(torch.from_dlpack(made), t(4, 6).t())


def test_random_sample_writes_int64_too() -> None:
    logits = ic.from_torch(torch.tensor([1.0, 5.0, 5.0]))
    for dtype in (torch.int32, torch.int64):
        out = ic.from_torch(torch.tensor(-1, dtype=dtype))
        assert F.random_sample(logits, 0.0, 0.9, 5, 1.0, out=out) is out
        assert int(torch.from_dlpack(out)) == 1  # the first of equals


def test_silu_is_delegated_to_ntops_on_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where use_ntops is set, on cuda and musa and without `out`; on the CPU never."""
    calls = []

    class Ntops:
        class torch:
            @staticmethod
            def silu(input: Any, inplace: bool = False) -> str:
                calls.append(inplace)
                return "theirs"

    x = ours(3, 4)
    monkeypatch.setattr(ic, "use_ntops", True)
    monkeypatch.setattr(ic, "ntops", Ntops, raising=False)
    assert isinstance(F.silu(x), ic.Tensor)
    x._device = ic.device("cuda")
    assert F.silu(x) == "theirs"
    assert F.silu(x, True) == "theirs"
    assert F.silu(x, out=x) is x
    monkeypatch.setattr(ic, "use_ntops", False)
    assert isinstance(F.silu(x), ic.Tensor)
    assert calls == [False, True]


# ---- the raw module ----

RAW = {
    "Add": ("add", "a b", "c"),
    "Mul": ("mul", "a b", "c"),
    "Gemm": ("matmul", "a b alpha", "c"),
    "Linear": ("linear", "x weight bias", "out"),
    "RMSNorm": ("rms_norm", "x w epsilon", "y"),
    "AddRMSNorm": ("add_rms_norm", "a b weight epsilon", "y residual_out"),
    "Attention": ("attention", "q k v k_cache v_cache pos", "out"),
    "CausalSoftmax": ("causal_softmax", "x", "y"),
    "Embedding": ("embedding", "ids weight", "out"),
    "RoPE": ("rope", "x pos_ids sin_table cos_table algo", "y"),
    "RandomSample": ("random_sample", "probs random_val topp topk temperature", "result"),
    "Silu": ("silu", "input", "output"),
    "SwiGLU": ("swiglu", "a b", "c"),
    "Rearrange": ("rearrange", "src", "dst"),
    "PagedAttention": ("paged_attention", "q k_cache v_cache block_tables seq_lens alibi_slopes scale", "out"),
    "PagedAttentionPrefill": (
        "paged_attention_prefill",
        "q k_cache v_cache block_tables seq_lens cum_seq_lens_q alibi_slopes scale",
        "out",
    ),
}


@functools.cache
def some_samples(name: str) -> list[CSample]:
    """Six of the operator's samples, the same for all tests, which copy what they change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = [s for s in samples(OPS[name]) if is_written(s) and all(v.numel() for v in tensors(s.args))]
    return found[:: max(len(found) // 6, 1)]


def tensors(args: Any) -> list[torch.Tensor]:
    return [v for v in args.values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("name", RAW)
def test_raw_forms(name: str) -> None:
    """X(...) makes its result, X_(out, ...) writes it, both what the op of the package gives."""
    function, inputs, outputs = RAW[name]
    for sample in some_samples(name):
        results = []
        for form in ("op", "in place", "result"):
            after, given = copies(sample)
            if name == "RoPE":
                given.algo = tuple(raw.RoPEAlgo.__members__.values())[given.algo]
            bare = {k: v._underlying if isinstance(v, ic.Tensor) else v for k, v in vars(given).items()}
            args, out = [bare[key] for key in inputs.split()], [bare[key] for key in outputs.split()]
            if form == "result":
                made = [torch.from_dlpack(ic.Tensor(m)) for m in as_tuple(getattr(raw, function)(*args))]
                results.append([bits(m.to(after[key].dtype)) for m, key in zip(made, outputs.split(), strict=True)])
                continue
            if form == "op":
                CALLS[name](copies_of(given, name))
            else:
                assert getattr(raw, f"{function}_")(*out, *args) is None
            results.append([bits(after[key]) for key in outputs.split()])
        for one in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(results[0], one, strict=True)), sample.name


def copies_of(given: Any, name: str) -> Any:
    if name == "RoPE":
        given.algo = given.algo.value
    return given


def test_raw_functions_release_what_they_check() -> None:
    """Wrong types are TypeError, what the C++ side refuses RuntimeError."""
    x = ours(3, 4)._underlying
    for wrong in (
        lambda: raw.add(x, None),
        lambda: raw.add(x, 1),
        lambda: raw.silu(t(3)),
        lambda: raw.rope(x, x, x, x, 1),
    ):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(RuntimeError, match="add: .* must have"):
        raw.add(x, ours(3, 5)._underlying)


# ---- refusals ----


def with_argument(name: str, key: str, value: Any) -> Any:
    _, given = copies(some_samples(name)[0])
    setattr(given, key, value)
    return given


def tensor_arguments() -> list[tuple[str, str]]:
    """(operator, argument) of every tensor that CALLS pass."""
    found = []
    for name in CALLS:
        sample = some_samples(name)[0]
        found += [(name, key) for key, value in sample.args.items() if isinstance(value, torch.Tensor)]
    return found


@pytest.mark.parametrize(("name", "key"), tensor_arguments())
def test_what_is_no_tensor_is_refused(name: str, key: str) -> None:
    """By function and argument, whatever came."""
    if (name, key) == ("RMSNorm", "w"):
        pytest.skip("its shape is read first")
    for wrong in (t(2, 2), 3, "x"):
        with pytest.raises(TypeError, match=r"infinicore\.\S+: \w+ must be an infinicore\.Tensor, got "):
            CALLS[name](with_argument(name, key, wrong))


@pytest.mark.parametrize("name", CALLS)
def test_another_dtype_is_refused(name: str) -> None:
    """In a sentence that names the op; the C operators' own tests have every rule."""
    first = next(key for key, value in some_samples(name)[0].args.items() if isinstance(value, torch.Tensor))
    bad = ic.from_torch(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match="must"):
        CALLS[name](with_argument(name, first, bad))


def test_sentences() -> None:
    x, w = ours(3, 4), ours(5)
    with pytest.raises(
        AssertionError, match=r"rms_norm: normalized_shape must be the shape of weight, \[5\], got \[4\]"
    ):
        F.rms_norm(x, [4], w)
    with pytest.raises(TypeError, match="rope: algo must be RopeAlgo.GPT_J or RopeAlgo.GPT_NEOX, got 1"):
        F.rope(x, x, x, x, 1)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="embedding: max_norm, norm_type"):
        F.embedding(x, x, max_norm=1.0)
    for function in (ic.add, F.silu, F.linear):
        assert inspect.signature(function).parameters["out"].kind is inspect.Parameter.KEYWORD_ONLY
