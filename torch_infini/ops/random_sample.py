"""random_sample: the next token of each sequence, drawn from its logits by temperature, top-k and top-p.

The kernel is csrc/infiniop/random_sample; it neither sorts nor softmaxes the row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec


def random_sample(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    seed: int | Tensor = 0,
    offset: int | Tensor = 0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token per row, each with its own settings and random stream.

    With the row sorted in descending order (equal logits: the lower index first), w_i = exp((x_i - x_0) / temperature),
    c_i = w_0 + ... + w_i and limit = u * min(c_(min(top_k, n) - 1), min(top_p, 1) * c_(n - 1)), the token is the first
    one with c_i >= limit. u = (r >> 8) * 2^-24, where r is the first 32-bit word of Philox4x32-10 for the key `seed`
    (low word, high word) and the counter `offset` (low word, high word, 0, 0). If temperature = 0, top_k = 1 or top_p =
    0, the token is the first maximum.

    A row's token depends only on that row and its settings, not on the rest of the batch or the threads.

    Args:
        logits: [rows, n] or [n], float32, bfloat16 or float16, n up to 2^24; stride 1 in the last dimension. A token
            whose logit is -infinity is never drawn.
        temperature: A number for all rows or [rows] float32 ([] if logits is [n]; likewise below); finite, at least 0.
        top_k: An integer for all rows or [rows] int64 or int32; 0 or less: no limit.
        top_p: A number for all rows or [rows] float32; at least 0; 1 or more: no limit.
        seed: An integer for all rows, taken modulo 2^64, or [rows] int64 or int32.
        offset: The position in the stream: [rows] int64 or int32, or an integer, to which the row's index is added, so
            that rows differ. Advance it by one per token (an integer: by the number of rows).
        out: Written and returned instead of a new tensor; undefined if the call raises for a value in logits.

    Returns:
        [rows] (or []) int64 token ids.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride; a temperature that is negative, infinite or NaN;
            a top_p that is negative or NaN; a NaN or +infinity in logits, or a row of -infinity only. On CUDA, where
            the host does not read the values, such a row gets a token below 0 instead: -1 - c for the first column c
            with NaN or +infinity, -1 - n for a row of -infinity only, -2 - n for invalid settings.

    Equivalent to:
        >>> w, order = torch.sort(torch.softmax(logits.double() / temperature, -1), descending=True, stable=True)
        >>> c = w.cumsum(-1)
        >>> limit = u * min(c[..., min(top_k or n, n) - 1], top_p * c[..., -1])  # for each row
        >>> token = order[(c >= limit).int().argmax()]

    Source: top-p as in Holtzman et al., The Curious Case of Neural Text Degeneration, 2019, arXiv:1904.09751; Philox as
    in Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011, doi:10.1145/2063384.2063405.
    """
    shape, device = logits.shape[:-1], logits.device

    def for_rows(value: float | Tensor, dtype: torch.dtype) -> Tensor:
        return value if isinstance(value, Tensor) else torch.full(shape, value, dtype=dtype, device=device)

    if not isinstance(seed, Tensor):
        seed = as_int64(seed)
    if not isinstance(offset, Tensor):
        index = torch.arange(shape.numel(), device=device).view(shape)
        offset = index + as_int64(offset)
    settings = (
        for_rows(temperature, torch.float32),
        for_rows(top_k, torch.int64),
        for_rows(top_p, torch.float32),
        for_rows(seed, torch.int64),
        offset,
    )
    op = torch.ops.infini.random_sample
    return op.default(logits, *settings) if out is None else op.out(logits, *settings, out=out)


def as_int64(value: int) -> int:
    """Return the int64 with the low 64 bits of an integer."""
    return (value + 2**63) % 2**64 - 2**63


def fake(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[:-1], dtype=torch.int64)


SPEC = OpSpec(
    random_sample,
    schema="(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor seed, Tensor offset) -> Tensor",
    fake=fake,
)
