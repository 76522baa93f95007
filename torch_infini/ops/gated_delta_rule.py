"""gated_delta_rule: linear attention whose state decays and is corrected, as in Qwen3-Next.

The kernel is csrc/infiniop/gated_delta_rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def gated_delta_rule(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    scale: float | None = None,
    l2norm: bool = False,
) -> None:
    """Compute linear attention by the gated delta rule; write the result and the state.

    For each token of a sequence and head of v, with the state S [Dk, Dv]: S = exp(g) S, then S = S + k (beta (v - k^T
    S)), then out = scale q^T S. All in float32, out rounded once. S begins as the sequence's row of the state, which
    then holds the last S; a sequence without tokens leaves it. Sequences of 16 tokens and more are computed in chunks
    of 64 tokens by matrix products, others step by step.

    Args:
        out: Written, the shape and dtype of v; stride 1 in the last dimension; shares no memory with the arguments.
        q: [batch, length, Hk, Dk], or [tokens, Hk, Dk] of one sequence or of those that offsets bound; float32,
            bfloat16 or float16; stride 1 in the last dimension.
        k: The shape and dtype of q; stride 1 in the last dimension.
        v: [batch, length, Hv, Dv] or [tokens, Hv, Dv] in the dtype of q; stride 1 in the last dimension. Hv is a
            multiple of Hk, and each head of q and k serves Hv / Hk consecutive ones of v.
        g: [batch, length, Hv] or [tokens, Hv] in the dtype of q or float32: the logarithm of the decay.
        beta: The shape of g, in the dtype of q or float32.
        state: [rows, Hv, Dk, Dv] float32, written; stride 1 in the last dimension. None: S begins as 0.
        offsets: [sequences + 1] int64 or int32, where sequences begin, and the number of tokens.
        slots: [sequences] int64 or int32, each sequence's row of the state, all different; the S of a sequence of a
            negative one begins as 0 and is not kept. None: the sequences' own numbers.
        scale: None: 1 / sqrt(Dk).
        l2norm: Whether q and k are first divided by sqrt(sum of squares + 1e-6).

    Returns:
        None.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, shared memory, offsets that do not rise from 0 to
            the number of tokens, slots that the state does not have or that are equal, or a scale that is not finite.
            On CUDA, where the kernel reads offsets and slots, tokens beyond x and sequences of wrong slots stay out.
        NotImplementedError: On CUDA, for more than 512 columns of q.

    Equivalent to:
        >>> groups = v.shape[-2] // q.shape[-2]  # one batch, no state
        >>> qs, ks = (t.float().repeat_interleave(groups, -2) for t in (q, k))
        >>> S = torch.zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
        >>> for t in range(v.shape[1]):
        ...     S = S * g[:, t, :, None, None].float().exp()
        ...     seen = (ks[:, t, :, :, None] * S).sum(-2)
        ...     u = beta[:, t, :, None].float() * (v[:, t].float() - seen)
        ...     S = S + ks[:, t, :, :, None] * u[:, :, None]
        ...     out[:, t] = (qs[:, t, :, :, None] * S).sum(-2) * q.shape[-1] ** -0.5

    Source: Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464.
    """
    op = torch.ops.infini.gated_delta_rule.default
    op(out, q, k, v, g, beta, state, offsets, slots, scale, l2norm)


SPEC = OpSpec(
    gated_delta_rule,
    schema="(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(b!)? state=None, "
    "Tensor? offsets=None, Tensor? slots=None, float? scale=None, bool l2norm=False) -> ()",
    fake=nothing,
)
