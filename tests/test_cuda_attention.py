"""attention over static and paged caches on CUDA: how keys are split, what may not change a row's bits, and what
becomes of lengths, blocks and starts that only the GPU can find wrong.

On a GPU, or on the emulated kernels (see test_cuda.py).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_infini.testing import check_against_reference, cuda_device
from torch_infini.testing.ops import Sample, all_op_infos
from torch_infini.testing.ops._paged_reference import first_seen
from torch_infini.testing.ops.attention import attention_inputs
from torch_infini.testing.ops.paged_attention import inputs as paged_inputs

DEVICE = cuda_device()
needs_cuda = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECS = {spec.name: spec for spec in all_op_infos()}
attention = torch.ops.infini.attention
paged_attention = torch.ops.infini.paged_attention
paged_attention_prefill = torch.ops.infini.paged_attention_prefill


def on_cuda(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- the plan, which is the host's ----


class Plan:
    """plan_splits and split_keys of csrc/infiniop/attention/splits.h."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.each.restype = ctypes.c_int64

    def splits(self, keys: int, kv_heads: int, multiprocessors: int) -> tuple[int, int]:
        """(wanted, count)."""
        out = (ctypes.c_int64 * 2)()
        self._library.plan(*map(ctypes.c_int64, (keys, kv_heads, multiprocessors)), out)
        return out[0], out[1]

    def keys(self, seen: int, wanted: int) -> int:
        return int(self._library.each(ctypes.c_int64(seen), ctypes.c_int64(wanted)))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    compiler = shutil.which(os.environ.get("CXX", "g++").split()[-1])
    if compiler is None:
        pytest.skip("no C++ compiler")
    header = Path(__file__).resolve().parent.parent / "csrc/infiniop/attention/splits.h"
    folder = tmp_path_factory.mktemp("splits")
    source = folder / "splits.cpp"
    source.write_text(
        f'#include "{header}"\n'
        'extern "C" void plan(int64_t keys, int64_t kv_heads, int64_t sms, int64_t *out) {\n'
        "    const auto splits = infini::attention::plan_splits(keys, kv_heads, sms);\n"
        "    out[0] = splits.wanted, out[1] = splits.count;\n"
        "}\n"
        "using infini::attention::split_keys;\n"
        'extern "C" int64_t each(int64_t keys, int64_t wanted) { return split_keys(keys, wanted); }\n'
    )
    library = folder / "splits.so"
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", source, "-o", library], check=True)
    return Plan(library)


CAPACITIES = (0, 1, 255, 256, 257, 2048, 4096, 8448, 10_001, 131_072, 2**31, 2**62)


def test_plan(plan: Plan) -> None:
    for multiprocessors in (1, 8, 108, 132):
        for kv_heads in (1, 2, 8, 40, 128, 1000):
            for capacity in CAPACITIES:
                wanted, count = plan.splits(capacity, kv_heads, multiprocessors)
                # Partial sums stay small: what one sequence has of them depends on the GPU, not on its capacity.
                assert 1 <= count <= wanted == -(-2 * multiprocessors // kv_heads)
                for length in (0, 1, *CAPACITIES, capacity):
                    keys = plan.keys(length, wanted)
                    assert keys >= 256 and keys % 64 == 0
                    if length <= capacity:
                        assert keys * count >= length, "all keys have a split"
                if count > 1:
                    assert any(-(-n // plan.keys(n, wanted)) == count for n in (capacity, 256 * count)), (
                        "none for nothing"
                    )


def test_plan_of_an_h200(plan: Plan) -> None:
    wanted = 33
    assert plan.splits(2048, 8, 132) == (wanted, 8) and plan.keys(2048, wanted) == 256  # 64 blocks for one sequence
    assert plan.splits(131_072, 8, 132) == (wanted, 33) and plan.keys(131_072, wanted) == 4_032
    assert plan.keys(4000, wanted) == 256  # 16 splits, 128 blocks, in a cache of any capacity


# ---- kernels ----


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 700, 40, 1, 64),  # more rows of a key head than one tile has, and split
        (2, 5, 600, 8, 2, 128),
        (1, 3, 300, 36, 2, 256),
        (1, 1, 520, 4, 4, 72),
        (1, 33, 70, 4, 2, 200),
        (1, 2, 290, 2, 1, 300),  # wider than the tensor cores' kernel
        (1, 9, 40, 2, 1, 1030),
    ],
    ids=str,
)
def test_shapes(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    q, k, v = attention_inputs(dtype, *sizes)
    for causal in (True, False):
        actual = attention(*on_cuda(q, k, v), causal=causal).cpu()
        sample = Sample(str(sizes), (q, k, v), {"causal": causal})
        check_against_reference(SPECS["attention"], sample, dtype, actual, on_cuda=True)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [1, 6, 40])
def test_neighbours_and_room_change_no_bit(dtype: torch.dtype, queries: int) -> None:
    """A sequence alone, in a batch, and with what a static cache holds behind it: the same bits."""
    q, k, v = on_cuda(*attention_inputs(dtype, 3, queries, 700, 8, 2, 64))
    lens = torch.tensor([690, 41, 300], device=DEVICE)
    together = attention(q, k, v, kv_lens=lens)
    for b in range(3):
        one = slice(b, b + 1)
        k[one, lens[b] :] = torch.nan
        assert same_bits(attention(q[one], k[one], v[one], kv_lens=lens[one]), together[one])


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [41, 256, 700, 2500])
def test_the_capacity_of_a_cache_changes_no_bit(dtype: torch.dtype, length: int) -> None:
    """A sequence is split by its own length, however long its cache is."""
    q, k, v = on_cuda(*attention_inputs(dtype, 1, 2, 9000, 4, 2, 16))
    lens = torch.tensor([length], device=DEVICE)
    expected = attention(q, k[:, :length], v[:, :length])
    for capacity in (length + 1, 3000, 9000):
        assert same_bits(attention(q, k[:, :capacity], v[:, :capacity], kv_lens=lens), expected), capacity


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("longest", [200, 700])
def test_the_capacity_of_a_table_changes_no_bit(dtype: torch.dtype, longest: int) -> None:
    q, k, v, tables, lens, _ = on_cuda(*paged_inputs(dtype, [longest, 33], 4, 2, 32, 16, [1, 1]))
    wide = torch.nn.functional.pad(tables, (0, 600), value=-1)
    for sinks in (None, torch.tensor([-1.3, 0.4, 1.7, 4.2]).to(DEVICE, dtype)):
        expected = paged_attention(q, k, v, tables, lens, sinks=sinks)
        assert same_bits(paged_attention(q, k, v, wide, lens, sinks=sinks), expected)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_exact_prefill(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """INFINI_EXACT_ATTENTION=1 rounds the result alone; without it probabilities are rounded too, which shows."""
    q, k, v = attention_inputs(dtype, 1, 70, 300, 4, 2, size)
    sample = Sample("prefill", (q, k, v))
    check = lambda actual, on_cuda=False: check_against_reference(SPECS["attention"], sample, dtype, actual, on_cuda)
    rounded = attention(*on_cuda(q, k, v)).cpu()
    check(rounded, True)
    with pytest.raises(AssertionError, match="elements are off"):
        check(rounded)
    monkeypatch.setenv("INFINI_EXACT_ATTENTION", "1")
    check(attention(*on_cuda(q, k, v)).cpu())
    monkeypatch.setenv("INFINI_EXACT_ATTENTION", "0")
    assert same_bits(attention(*on_cuda(q, k, v)).cpu(), rounded)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_allowed_notices_a_lost_key(dtype: torch.dtype) -> None:
    """And one that counts twice, of 300."""
    q, k, v = attention_inputs(dtype, 1, 70, 300, 4, 2, 64)
    sample = Sample("prefill", (q, k, v), {"causal": False})
    reference = SPECS["attention"].reference
    for keys in ([*range(16), *range(17, 300)], [16, *range(300)]):
        wrong = reference(q, k[:, keys], v[:, keys], causal=False).to(dtype)
        with pytest.raises(AssertionError, match="elements are off"):
            check_against_reference(SPECS["attention"], sample, dtype, wrong, on_cuda=True)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 5, 64, 260])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_paged_neighbours_change_no_bit(dtype: torch.dtype, window: int, softcap: float) -> None:
    """Decode, short and long prefill in one call, and each alone; also with a softcap and sinks."""
    sinks = torch.linspace(-3, 9, 8).to(DEVICE, dtype) if softcap else None
    terms = {"window": window, "softcap": softcap, "sinks": sinks}
    lengths, queries = [700, 33, 90, 300], [1, 33, 3, 20]
    q, k, v, tables, lens, starts = on_cuda(*paged_inputs(dtype, lengths, 8, 2, 64, 16, queries, window))
    together = paged_attention_prefill(q, k, v, tables, lens, starts, **terms)
    for b, count in enumerate(queries):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        alone = torch.tensor([0, count], device=DEVICE)
        one = paged_attention_prefill(q[rows], k, v, tables[b : b + 1], lens[b : b + 1], alone, **terms)
        assert same_bits(one, together[rows]), b
    decoded = paged_attention(q[:1], k, v, tables[:1], lens[:1], **terms)
    assert same_bits(decoded, together[:1])


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 30, 64, 520])
def test_what_a_window_hides_is_not_read(dtype: torch.dtype, window: int) -> None:
    lengths, queries = [700, 33, 90, 300, 1100], [1, 33, 3, 120, 2]
    args = on_cuda(*paged_inputs(dtype, lengths, 4, 1, 40, 16, queries))
    _, k, v, tables, *_ = args
    expected = paged_attention_prefill(*args, window=window)
    for b, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        first = first_seen(length, count, window)
        for key in range(first):
            k[tables[b, key // 16], :, key % 16] = torch.nan
            v[tables[b, key // 16], :, key % 16] = torch.inf
        tables[b, : first // 16] = -1 if b % 2 else 2**40
    assert same_bits(paged_attention_prefill(*args, window=window), expected)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_without_effect(dtype: torch.dtype) -> None:
    """-infinity changes no bit, a sink above all scores leaves zeros, and infinity and NaN are seen in the result."""
    args = on_cuda(*paged_inputs(dtype, [700, 40, 30], 4, 2, 64, 16, [1, 40, 3]))
    sinks = torch.tensor([-torch.inf, 1000, torch.inf, torch.nan]).to(DEVICE, dtype)
    y = paged_attention_prefill(*args, sinks=sinks)
    assert same_bits(y[:, 0], paged_attention_prefill(*args)[:, 0])
    assert not y[:, 1].any()
    assert y[:, 2:].isnan().all()


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [60, 700])
def test_bad_lengths_become_nan(dtype: torch.dtype, keys: int) -> None:
    q, k, v = on_cuda(*attention_inputs(dtype, 4, 1, keys, 4, 2, 64))
    good = attention(q, k, v)
    bad = attention(q, k, v, kv_lens=torch.tensor([keys, -1, keys + 1, 2**40], device=DEVICE))
    assert same_bits(bad[0], good[0])
    assert bad[1:].isnan().all()


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [-1, 2**40, -(2**62)])
def test_bad_blocks_become_nan(dtype: torch.dtype, wrong: int) -> None:
    """Only in rows that see a key of the block; nothing outside the cache is read."""
    lengths, queries = [40, 700, 40], [40, 1, 1]
    q, k, v, tables, lens, starts = on_cuda(*paged_inputs(dtype, lengths, 4, 2, 64, 16, queries))
    good = paged_attention_prefill(q, k, v, tables, lens, starts)
    tables[0, 1] = tables[1, 30] = wrong  # of keys 16 to 31, and 480 to 495
    actual = paged_attention_prefill(q, k, v, tables, lens, starts)
    assert actual[16:41].isnan().all()
    assert same_bits(actual[:16], good[:16]) and same_bits(actual[41], good[41])
    decoded = paged_attention(q[39:], k, v, tables, lens)
    assert decoded[:2].isnan().all() and not decoded[2].isnan().any()


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_starts_become_nan(dtype: torch.dtype) -> None:
    q, k, v, tables, lens, starts = on_cuda(*paged_inputs(dtype, [40, 30], 4, 2, 64, 16, [20, 3]))
    for wrong in ([1, 20, 23], [0, 20, 22], [0, 24, 23], [0, -5, 23], [0, 2**62, -(2**62)]):
        actual = paged_attention_prefill(q, k, v, tables, lens, torch.tensor(wrong, device=DEVICE))
        assert actual.isnan().all(), wrong
    fewer_keys = torch.tensor([19, 30], device=DEVICE)  # than the first sequence has queries
    actual = paged_attention_prefill(q, k, v, tables, fewer_keys, starts)
    good = paged_attention_prefill(q, k, v, tables, lens, starts)
    assert actual[:20].isnan().all() and same_bits(actual[20:], good[20:])


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_sequences(dtype: torch.dtype) -> None:
    """More than a warp looks through at once, some without queries."""
    queries = [(7 * i) % 11 for i in range(70)]
    lengths = [n + i % 5 for i, n in enumerate(queries)]
    sample = Sample("many", paged_inputs(dtype, lengths, 4, 1, 16, 4, queries))
    actual = paged_attention_prefill(*on_cuda(*sample.args)).cpu()
    check_against_reference(SPECS["paged_attention_prefill"], sample, dtype, actual, on_cuda=True)
