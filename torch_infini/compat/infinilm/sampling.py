"""The tokens that InferEngine.forward returns: by a fixed number in place of a random one, as in InfiniLM, or drawn.

Both use torch_infini.ops.random_sample's kernel; random_sample_given takes the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.random_sample import as_int64
from .convert import underlying

FIXED = 0.1  # InfiniLM's constant in place of a random number


class Settings(NamedTuple):
    """The settings of each row: [rows] float32, int64, float32."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor


def settings(where: str, rows: int, temperature: Any, top_k: Any, top_p: Any) -> Settings:
    """Convert settings, each a number, or a list or tensor with one per row; ValueError for invalid values."""
    found = Settings(
        _each(where, "temperature", temperature, rows, torch.float32),
        _each(where, "top_k", top_k, rows, torch.int64),
        _each(where, "top_p", top_p, rows, torch.float32),
    )
    t, p = found.temperature, found.top_p
    if not ((t >= 0) & (t < inf)).all():
        wide = torch.as_tensor(underlying(temperature), dtype=torch.float64)
        if ((wide >= 0) & (wide < inf)).all():
            largest = torch.finfo(torch.float32).max
            raise ValueError(f"{where}: temperature must be at most {largest:g}, float32's largest, got {temperature}")
        raise ValueError(f"{where}: temperature must be finite and at least 0, got {temperature}")
    if not (p >= 0).all():
        raise ValueError(f"{where}: top_p must be at least 0, got {top_p}")
    return found


def _each(where: str, name: str, value: Any, rows: int, dtype: torch.dtype) -> Tensor:
    value, kind = underlying(value), "an integer" if dtype == torch.int64 else "a number"
    try:
        values = torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        kind += " of 64 bits" if isinstance(error, RuntimeError) and dtype == torch.int64 else ""
        raise ValueError(f"{where}: {name} must be {kind} or one for each of {rows} rows, got {value!r}") from None
    right = values.dtype != torch.bool and not (dtype == torch.int64 and values.is_floating_point())
    if not right or values.is_complex() or values.shape not in ((), (rows,)):
        raise ValueError(f"{where}: {name} must be {kind} or one for each of {rows} rows, got {value!r}")
    return values.to(dtype).expand(rows)


def each_seed(where: str, rows: int, seed: Any) -> list[int]:
    """Convert to one integer per row, of any size; ValueError for other types."""
    seed = underlying(seed)
    seeds = seed.tolist() if isinstance(seed, Tensor) else seed
    seeds = [seeds] * rows if isinstance(seeds, int) else seeds
    if not (isinstance(seeds, (list, tuple)) and len(seeds) == rows and all(isinstance(s, int) for s in seeds)):
        raise ValueError(f"{where}: seed must be an integer or one for each of {rows} rows, got {seed!r}")
    return list(seeds)


def by_fixed_number(logits: Tensor, rows: Settings, u: float = FIXED) -> Tensor:
    """Return the tokens of torch_infini.ops.random_sample if its random number is u, in float32.

    Args:
        logits: [n, vocabulary].
        rows: The settings of n rows, on the CPU.
        u: From 0 to 1.

    Returns:
        [n] int64.

    Raises:
        RuntimeError: If a row of logits holds NaN or +infinity, or only -infinity.
    """
    temperature, top_k, top_p = rows
    if ((temperature == 0) | (top_k == 1) | (top_p == 0)).all():  # the first maxima, in one call
        coldest = rows._replace(temperature=torch.zeros_like(temperature))
        return drawn(logits, coldest, [0] * len(logits), torch.zeros_like(top_k))
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for row, (t, k, p) in enumerate(zip(temperature.tolist(), top_k.tolist(), top_p.tolist(), strict=True)):
        torch.ops.infini.random_sample_given.out(logits[row], u, min(p, 1.0), k, t, out=tokens[row])
    return checked(tokens)


def drawn(logits: Tensor, rows: Settings, seeds: Sequence[int], offsets: Tensor) -> Tensor:
    """Return tokens [n] for random numbers: those of the rows' seeds, at offsets [n] int64 of their streams."""
    streams = (torch.tensor([as_int64(seed) for seed in seeds], dtype=torch.int64), offsets)
    device = logits.device
    tokens = torch.ops.infini.random_sample.default(logits, *(x.to(device).contiguous() for x in (*rows, *streams)))
    return checked(tokens)


def checked(tokens: Tensor) -> Tensor:
    """Return the tokens; RuntimeError if one is below 0, CUDA's code for a row that cannot be sampled."""
    if (tokens < 0).any():
        raise RuntimeError(_BAD)
    return tokens


_BAD = "infinilm.InferEngine.forward: logits must be finite numbers, got others; look at the parameters"
