"""paged_attention's window on the CPU: what it hides is not looked at, and a row's bits are its sequence's alone."""

from __future__ import annotations

import pytest
import torch

from torch_infini.testing import cpu_capability_set_to, kernel_levels
from torch_infini.testing.ops._paged_reference import first_seen
from torch_infini.testing.ops.paged_attention import inputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
paged_attention = torch.ops.infini.paged_attention
paged_attention_prefill = torch.ops.infini.paged_attention_prefill
capabilities = pytest.mark.parametrize("capability", kernel_levels())

# Terms of the scores: a soft cap and sinks for 4 heads.
TERMS = pytest.mark.parametrize("softcap,sinks", [(0.0, None), (2.0, (-3.0, 0.0, 1.5, 30.0))], ids=["plain", "terms"])

# (keys, queries) of sequences: decode split and not, many rows and few, longer and shorter than the windows.
SEQUENCES = [(700, 1), (33, 33), (90, 3), (300, 120), (5, 1), (1500, 2), (64, 0)]


@capabilities
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 10, 64, 520])
@pytest.mark.parametrize("block_size", [5, 16, 256])
def test_what_a_window_hides_is_not_read(dtype: torch.dtype, window: int, block_size: int, capability: str) -> None:
    lengths, queries = map(list, zip(*SEQUENCES, strict=True))
    args = inputs(dtype, lengths, 4, 2, 40, block_size, queries)
    _, k, v, tables, *_ = args
    with cpu_capability_set_to(capability):
        expected = paged_attention_prefill(*args, window=window)
        for b, (length, count) in enumerate(SEQUENCES):
            first = first_seen(length, count, window)
            for key in range(first):
                k[tables[b, key // block_size], :, key % block_size] = torch.nan
                v[tables[b, key // block_size], :, key % block_size] = torch.inf
            tables[b, : first // block_size] = -1 if b % 2 else 2**40
        assert torch.equal(paged_attention_prefill(*args, window=window), expected)


@capabilities
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 10, 64, 520])
@TERMS
def test_neighbours_change_no_bit(
    dtype: torch.dtype, window: int, capability: str, softcap: float, sinks: tuple[float, ...] | None
) -> None:
    """Decode, short and long prefill in one call, and each alone."""
    terms = {"window": window, "softcap": softcap, "sinks": None if sinks is None else torch.tensor(sinks, dtype=dtype)}
    lengths, queries = map(list, zip(*SEQUENCES, strict=True))
    q, k, v, tables, lens, starts = inputs(dtype, lengths, 4, 2, 64, 16, queries, window)
    with cpu_capability_set_to(capability):
        together = paged_attention_prefill(q, k, v, tables, lens, starts, **terms)
        for b, count in enumerate(queries):
            rows, one = slice(starts[b], starts[b + 1]), slice(b, b + 1)
            alone = torch.tensor([0, count])
            actual = paged_attention_prefill(q[rows], k, v, tables[one], lens[one], alone, **terms)
            assert torch.equal(actual, together[rows]), b
            if count == 1:
                decoded = paged_attention(q[rows], k, v, tables[one], lens[one], **terms)
                assert torch.equal(decoded, together[rows]), b


@capabilities
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_of_all_keys_changes_no_bit(dtype: torch.dtype, capability: str) -> None:
    args = inputs(dtype, [700, 300], 4, 2, 64, 16, [1, 120])
    with cpu_capability_set_to(capability):
        assert torch.equal(paged_attention_prefill(*args, window=700), paged_attention_prefill(*args))


@capabilities
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_without_effect(dtype: torch.dtype, capability: str) -> None:
    """-infinity changes no bit, a sink above all scores leaves zeros, and infinity and NaN are seen in the result."""
    q, *args = inputs(dtype, [700, 40, 0], 4, 2, 64, 16, [1, 40, 0])
    sinks = torch.tensor([-torch.inf, 1000, torch.inf, torch.nan], dtype=dtype)
    with cpu_capability_set_to(capability):
        expected = paged_attention_prefill(q, *args)
        y = paged_attention_prefill(q, *args, sinks=sinks)
    assert torch.equal(y[:, 0], expected[:, 0])
    assert not y[:, 1].any()
    assert y[:, 2:].isnan().all()


def test_blocks_in_the_window_are_checked() -> None:
    """The newest 12 of 60 keys are in block 3, the one before them is in block 2."""
    args = inputs(torch.float32, [60], 4, 2, 64, window=12)
    paged_attention(*args, window=12)
    with pytest.raises(RuntimeError, match=r"block_tables must name blocks .* got -7 at \[0, 2\]"):
        paged_attention(*args, window=13)
