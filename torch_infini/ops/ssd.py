"""ssd: Mamba-2's state space layer by state space duality, with a state.

The kernel is csrc/infiniop/ssd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def ssd(
    out: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state: Tensor | None = None,
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    dt_softplus: bool = False,
    dt_min: float | None = None,
    dt_max: float | None = None,
) -> None:
    """Compute Mamba-2's selective state space; write the result and the state.

    For each token of a sequence and head of x, with the state S [P, N]: S = exp(dt a) S + dt x b^T, then out = S c + d
    x. All in float32, out rounded once. S begins as the sequence's row of the state, which then holds the last S; a
    sequence without tokens leaves it. Sequences of 16 tokens and more are computed in chunks of 64 tokens by matrix
    products, others step by step.

    Args:
        out: Written, the shape of x, in its dtype or float32; stride 1 in the last dimension; shares no memory with the
            arguments.
        x: [batch, length, H, P], or [tokens, H, P] of one sequence or of those that offsets bound; float32, bfloat16 or
            float16; stride 1 in the last dimension.
        dt: [batch, length, H] or [tokens, H] in the dtype of x or float32: the time steps.
        a: [H] float32: the rate of each head, negative for a state that decays.
        b: [batch, length, G, N] or [tokens, G, N] in the dtype of x; stride 1 in the last dimension. H is a multiple of
            G, and each group of b and c serves H / G consecutive heads.
        c: The shape and dtype of b; stride 1 in the last dimension.
        d: [H] in the dtype of x or float32; None: 0.
        dt_bias: [H] in the dtype of x or float32, added to dt first. None: 0.
        state: [rows, H, P, N] float32, written; stride 1 in the last dimension. None: S begins as 0.
        offsets: [sequences + 1] int64 or int32, where sequences begin, and the number of tokens.
        slots: [sequences] int64 or int32, each sequence's row of the state, all different; the S of a sequence of a
            negative one begins as 0 and is not kept. None: the sequences' own numbers.
        dt_softplus: Whether dt is then passed through softplus, log(1 + exp(dt)).
        dt_min: dt is then made at least this. None: no limit.
        dt_max: And at most this. None: no limit.

    Returns:
        None.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, shared memory, offsets that do not rise from 0 to
            the number of tokens, slots that the state does not have or that are equal, or limits in the wrong order.
            On CUDA, where the kernel reads offsets and slots, tokens beyond x and sequences of wrong slots stay out.
        NotImplementedError: On CUDA, for more than 512 columns of b.

    Equivalent to:
        >>> heads = x.shape[-2] // b.shape[-2]  # one batch, no state
        >>> bs, cs = (t.float().repeat_interleave(heads, -2) for t in (b, c))
        >>> S = torch.zeros(x.shape[0], *x.shape[2:], b.shape[-1])
        >>> for t in range(x.shape[1]):
        ...     step = dt[:, t].float()  # with the bias, softplus and limits that are given
        ...     S = S * (step * a).exp()[..., None, None]
        ...     S = S + (step[..., None] * x[:, t].float())[..., None] * bs[:, t, :, None]
        ...     out[:, t] = (S * cs[:, t, :, None]).sum(-1) + d[:, None] * x[:, t].float()

    Source: Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State
    Space Duality, arXiv:2405.21060.
    """
    op = torch.ops.infini.ssd.default
    op(out, x, dt, a, b, c, d, dt_bias, state, offsets, slots, dt_softplus, dt_min, dt_max)


SPEC = OpSpec(
    ssd,
    schema="(Tensor(a!) out, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d=None, Tensor? dt_bias=None, "
    "Tensor(b!)? state=None, Tensor? offsets=None, Tensor? slots=None, bool dt_softplus=False, float? dt_min=None, "
    "float? dt_max=None) -> ()",
    fake=nothing,
)
