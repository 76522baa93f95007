"""random_sample_given: one token for a random number that the caller has drawn, as in InfiniCore's random_sample.

The kernels are random_sample's, in csrc/infiniop/random_sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec


def random_sample_given(
    logits: Tensor,
    random_val: float,
    topp: float = 1.0,
    topk: int = 0,
    temperature: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token from a row of logits by a given random number.

    The token of random_sample for u = random_val, top_p = topp and top_k = topk: with the logits sorted in descending
    order (equal ones: the lower index first), w_i = exp((x_i - x_0) / temperature), c_i = w_0 + ... + w_i and limit =
    random_val * min(c_(min(topk, n) - 1), min(topp, 1) * c_(n - 1)), it is the first one with c_i >= limit. If
    random_val, topp or temperature is 0, or topk is 1, it is the first maximum. Weights are float32 (float64 for
    float64), their sums float64. Numbers are rounded to float32 before they are used.

    Args:
        logits: [n] float32, bfloat16, float16 or float64, n from 1 to 2^24; stride 1. -infinity masks a token.
        random_val: From 0 to 1.
        topp: Finite, at least 0; 1 or more: no limit.
        topk: 0 or less: no limit.
        temperature: Finite, at least 0.
        out: [] of any integer dtype that holds n - 1, written and returned instead of a new tensor.

    Returns:
        [] int32, the token's index.

    Raises:
        RuntimeError: For an unsupported rank, dtype or stride; a number out of range; a NaN or +infinity in logits, or
            only -infinity. On CUDA, where the host does not read the values, such a row gets a token below 0 instead:
            -1 - c for the first column c with NaN or +infinity, -1 - n for only -infinity; in dtypes of less than 4
            bytes all bits set.

    Equivalent to:
        >>> w, order = torch.sort(torch.softmax(logits.double() / temperature, -1), descending=True, stable=True)
        >>> c = w.cumsum(-1)
        >>> n = logits.numel()
        >>> limit = random_val * min(c[(min(topk, n) if topk > 0 else n) - 1], min(topp, 1) * c[-1])
        >>> token = order[(c >= limit).int().argmax()].int()

    Source: top-p as in Holtzman et al., The Curious Case of Neural Text Degeneration, 2019, arXiv:1904.09751.
    """
    if out is None:
        return torch.ops.infini.random_sample_given.default(logits, random_val, topp, topk, temperature)
    return torch.ops.infini.random_sample_given.out(logits, random_val, topp, topk, temperature, out=out)


def fake(logits: Tensor, random_val: float, topp: float = 1.0, topk: int = 0, temperature: float = 1.0) -> Tensor:
    return logits.new_empty((), dtype=torch.int32)


SPEC = OpSpec(
    name="random_sample_given",
    schema="(Tensor logits, float random_val, float topp=1.0, int topk=0, float temperature=1.0) -> Tensor",
    function=random_sample_given,
    fake=fake,
)
