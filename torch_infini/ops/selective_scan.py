"""selective_scan: Mamba's state space layer, with a state.

The kernel is csrc/infiniop/selective_scan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def selective_scan(
    out: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    state: Tensor | None = None,
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    dt_softplus: bool = False,
) -> None:
    """Compute Mamba's selective state space; write the result and the state.

    For each token of a sequence and channel of x, with the state S [N]: S = exp(dt a) S + dt x b, then out = (S . c + d
    x) silu(z). All in float32, out rounded once. S begins as the sequence's row of the state, which then holds the last
    S; a sequence without tokens leaves it.

    Args:
        out: Written, the shape of x, in its dtype or float32; stride 1 in the last dimension; shares no memory with the
            arguments.
        x: [batch, length, channels], or [tokens, channels] of one sequence or of those that offsets bound; float32,
            bfloat16 or float16; stride 1 in the last dimension.
        dt: The shape of x, in its dtype or float32: the time steps; any strides.
        a: [channels, N] float32: the rate of each state, negative for one that decays; stride 1 in the last dimension.
        b: [batch, length, N] or [tokens, N] in the dtype of x; stride 1 in the last dimension.
        c: The shape and dtype of b; stride 1 in the last dimension.
        d: [channels] in the dtype of x or float32; None: 0.
        dt_bias: [channels] in the dtype of x or float32, added to dt first. None: 0.
        z: The shape and dtype of x: the gate; any strides. None: out is not multiplied.
        state: [rows, channels, N] float32, written; stride 1 in the last dimension. None: S begins as 0.
        offsets: [sequences + 1] int64 or int32, where sequences begin, and the number of tokens.
        slots: [sequences] int64 or int32, each sequence's row of the state, all different; the S of a sequence of a
            negative one begins as 0 and is not kept. None: the sequences' own numbers.
        dt_softplus: Whether dt is then passed through softplus, log(1 + exp(dt)).

    Returns:
        None.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, shared memory, offsets that do not rise from 0 to
            the number of tokens, or slots that the state does not have or that are equal.
            On CUDA, where the kernel reads offsets and slots, tokens beyond x and sequences of wrong slots stay out.
        NotImplementedError: On CUDA, for more than 256 columns of a.

    Equivalent to:
        >>> S = torch.zeros(x.shape[0], *a.shape)  # one batch, no state
        >>> for t in range(x.shape[1]):
        ...     step = dt[:, t, :, None].float()  # with the bias and softplus that are given
        ...     S = S * (step * a).exp() + step * x[:, t, :, None].float() * b[:, t, None].float()
        ...     y = (S * c[:, t, None].float()).sum(-1) + d * x[:, t].float()
        ...     out[:, t] = y  # with z: y * torch.nn.functional.silu(z[:, t].float())

    Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, arXiv:2312.00752.
    """
    op = torch.ops.infini.selective_scan.default
    op(out, x, dt, a, b, c, d, dt_bias, z, state, offsets, slots, dt_softplus)


SPEC = OpSpec(
    selective_scan,
    schema="(Tensor(a!) out, Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d=None, Tensor? dt_bias=None, "
    "Tensor? z=None, Tensor(b!)? state=None, Tensor? offsets=None, Tensor? slots=None, bool dt_softplus=False) -> ()",
    fake=nothing,
)
