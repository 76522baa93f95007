"""causal_conv1d: short causal convolution of each channel, with a state.

The kernel is csrc/infiniop/causal_conv1d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def causal_conv1d(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    offsets: Tensor | None = None,
    slots: Tensor | None = None,
    silu: bool = False,
) -> None:
    """Convolve each channel with its own short filter, over the past alone; write the result and the state.

    out[t, c] = act(bias[c] + sum_j weight[c, j] * x[t - width + 1 + j, c]), in float32, rounded once. What precedes a
    sequence comes from its row of the state, which then holds the last columns of what precedes and the sequence; a
    sequence without tokens leaves it. Prompts, their parts and single steps are calls of one kind.

    Args:
        out: Written, the shape and dtype of x; stride 1 in the last dimension; shares no memory with the arguments.
        x: [batch, length, channels], or [tokens, channels] of one sequence or of those that offsets bound; float32,
            bfloat16 or float16; stride 1 in the last dimension.
        weight: [channels, width] in the dtype of x or float32, width 2 to 8; any strides, fastest with stride 1 between
            channels.
        bias: [channels] in the dtype of weight.
        state: [rows, channels, columns] in the dtype of x, written; columns at least width - 1, the newest last; any
            strides. None: zeros precede each sequence.
        offsets: [sequences + 1] int64 or int32, where sequences begin, and the number of tokens.
        slots: [sequences] int64 or int32, each sequence's row of the state, all different; a sequence of a negative one
            follows zeros, and its state is not kept. None: the sequences' own numbers.
        silu: Whether act is silu; else nothing.

    Returns:
        None.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, shared memory, offsets that do not rise from 0 to
            the number of tokens, or slots that the state does not have or that are equal.
            On CUDA, where the kernel reads offsets and slots, tokens beyond x and sequences of wrong slots stay out.

    Equivalent to:
        >>> width = weight.shape[1]  # one batch, no state
        >>> past = torch.nn.functional.pad(x.mT.float(), (width - 1, 0))
        >>> y = torch.nn.functional.conv1d(past, weight[:, None].float(), groups=weight.shape[0])
        >>> out.copy_(y.mT)  # with silu: torch.nn.functional.silu(y)

    Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, arXiv:2312.00752.
    """
    torch.ops.infini.causal_conv1d.default(out, x, weight, bias, state, offsets, slots, silu)


SPEC = OpSpec(
    causal_conv1d,
    schema="(Tensor(a!) out, Tensor x, Tensor weight, Tensor? bias=None, Tensor(b!)? state=None, "
    "Tensor? offsets=None, Tensor? slots=None, bool silu=False) -> ()",
    fake=nothing,
)
