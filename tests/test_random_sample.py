"""random_sample as a distribution and as a stream: what the generic tests, token by token, cannot see.

Frequencies against probabilities, Philox against known answers, independence of the batch, the wrapper's scalars.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_infini
from torch_infini.testing.ops.random_sample import philox, sorted_row, uniform

random_sample = torch_infini.ops.random_sample

DRAWS = 20_000
PROBABILITIES = torch.tensor([0.30, 0.02, 0.22, 0.11, 0.11, 0.08, 0.16])


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(key: tuple, counter: tuple, words: tuple) -> None:
    """The vectors that Random123 ships (kat_vectors)."""
    assert philox(key, counter) == words


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
@pytest.mark.parametrize("offset", [0, 5, -1, 2**32, 2**63 - 1])
def test_philox_of_the_kernel(seed: int, offset: int) -> None:
    """With 2^24 equal logits the token is u itself, bit by bit: the first i with i + 1 >= u * 2^24."""
    token = random_sample(torch.zeros(2**24, dtype=torch.bfloat16), seed=seed, offset=offset)
    assert int(token) == max(int(uniform(seed, offset) * 2**24) - 1, 0)


def expected_probabilities(temperature: float, top_k: int, top_p: float) -> Tensor:
    """From the definition: u is uniform, so a token's probability is its share of [0, limit at u = 1]."""
    weights = PROBABILITIES.double() ** (1 / temperature)
    weights, order = (weights / weights.sum()).sort(descending=True, stable=True)
    cumulative = weights.cumsum(0)
    end = min(cumulative[(top_k or 7) - 1].item(), top_p)
    share = (cumulative.clamp(max=end) - (cumulative - weights).clamp(max=end)) / end
    return torch.zeros(7, dtype=torch.float64).scatter(0, order, share)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.75), (1.6, 5, 0.6), (1.0, 3, 0.99)],
)
def test_frequencies(temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square over consecutive offsets of one seed. The draws are fixed, so the outcome does not vary."""
    logits = PROBABILITIES.log().expand(DRAWS, 7)
    tokens = random_sample(logits, temperature, top_k, top_p, seed=1234)
    counts = torch.bincount(tokens, minlength=7).double()
    expected = expected_probabilities(temperature, top_k, top_p) * DRAWS
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    # The 99.9 % quantiles of the chi-square distribution, by degrees of freedom.
    quantile = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46}[int(possible.sum()) - 1]
    assert chi_square < quantile, f"{counts.tolist()} draws, expected {expected.tolist()}"


def test_frequencies_over_seeds() -> None:
    """Other seeds at one offset are independent draws as well."""
    logits = PROBABILITIES.log().expand(DRAWS, 7)
    tokens = random_sample(logits, seed=torch.arange(DRAWS), offset=torch.zeros(DRAWS, dtype=torch.int64))
    expected = PROBABILITIES.double() * DRAWS
    chi_square = ((torch.bincount(tokens, minlength=7) - expected) ** 2 / expected).sum().item()
    assert chi_square < 22.46


def test_same_seed_and_offset_same_token() -> None:
    logits = torch.randn(8, 5000)
    first = random_sample(logits, 0.9, 40, 0.95, seed=7, offset=100)
    assert torch.equal(first, random_sample(logits, 0.9, 40, 0.95, seed=7, offset=100))
    assert not torch.equal(first, random_sample(logits, 0.9, 40, 0.95, seed=8, offset=100))
    assert not torch.equal(first, random_sample(logits, 0.9, 40, 0.95, seed=7, offset=108))


def test_a_row_alone_gives_its_token_in_a_batch() -> None:
    rows = 40
    logits = torch.randn(rows, 3001) * 3
    settings = (
        torch.linspace(0, 2, rows),
        torch.arange(rows) * 37 % 100,
        torch.linspace(1.1, 0.2, rows),
        torch.arange(rows) * 12345,
        torch.arange(rows) * 77,
    )
    together = random_sample(logits, *settings)
    order = torch.randperm(rows)
    assert torch.equal(random_sample(logits[order], *(s[order] for s in settings)), together[order])
    for row in range(rows):
        alone = random_sample(logits[row], *(s[row] for s in settings))
        assert alone.shape == () and alone == together[row]


def test_scalars_stand_for_rows() -> None:
    """One seed for all rows; the offset counts on from row to row."""
    logits = torch.randn(5, 300)
    full = lambda value, dtype: torch.full((5,), value, dtype=dtype)  # noqa: E731
    tensors = (full(0.8, torch.float32), full(20, torch.int64), full(0.9, torch.float32), full(3, torch.int64))
    expected = random_sample(logits, *tensors, torch.arange(5) + 11)
    assert torch.equal(random_sample(logits, 0.8, 20, 0.9, seed=3, offset=11), expected)
    out = torch.empty(5, dtype=torch.int64)
    assert random_sample(logits, 0.8, 20, 0.9, seed=3, offset=11, out=out) is out
    assert torch.equal(out, expected)
    assert torch.equal(random_sample(logits, seed=2**64 - 1), random_sample(logits, seed=-1))


@pytest.mark.parametrize("settings", [(0.0, 50, 0.9), (1.0, 1, 0.9), (1.0, 50, 0.0)], ids=["temperature", "k", "p"])
def test_first_maximum(settings: tuple[float, int, float]) -> None:
    logits = torch.randn(6, 20000)
    logits[:, [19999, 13, 7000]] = 9.0
    assert random_sample(logits, *settings).tolist() == [13] * 6
    flat = logits.clamp(max=0)  # half of the row is at the maximum
    assert random_sample(flat, *settings).tolist() == (flat == 0).int().argmax(1).tolist()


def test_every_offset_stays_inside_the_limits() -> None:
    """Over many draws no token comes from beyond top-k and top-p, and each that is inside can come."""
    logits = torch.randn(50).expand(5000, 50)
    order, cumulative, _ = sorted_row(logits[0], 0.0, 1.0, 0, 1.0)
    inside = int((cumulative < 0.7 * cumulative[-1]).sum()) + 1
    tokens = random_sample(logits, 1.0, 0, 0.7)
    assert set(tokens.tolist()) == set(order[:inside].tolist())
    tokens = random_sample(logits, 1.0, 5, 0.99999)
    assert set(tokens.tolist()) == set(order[:5].tolist())
