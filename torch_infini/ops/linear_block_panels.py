"""linear_block_panels: the product with blocks that pack_blocks has laid out in panels of 16 rows.

The kernels are in csrc/infiniop/linear_block_panels. Models hold a checkpoint's blocks so if that is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec

PANEL = 16  # rows


def linear_block_panels(
    x: Tensor, weight: Tensor, kind: int, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Multiply the rows of x by a transposed weight in panels of blocks, and add the bias.

    y = x @ w^T + bias, where w is the weight in blocks that was packed, as linear_blocks decodes it. If x is bfloat16,
    the sum over a group of columns of code * x is multiplied by the group's scale, and the sum of x by its shift, on
    CPUs with AVX2 or AVX-512 and without AMX: weights are not rounded to bfloat16. Where the CPU does not multiply
    bfloat16 in pairs (AVX-512 BF16), x becomes integers of 16 bits with a power of two for each group, so that its
    elements are exact but for those below 2^-7 of their group's largest, which are off by at most 2^-15 of it.
    Otherwise the results have the bits of linear_blocks, whose rows are unpacked first. Sums are in float32, in an
    order that depends on k alone, and rounded once: a row gives the same bits whatever the thread count and the other
    rows of the call.

    The weight has as many bytes as its blocks. With few rows of bfloat16 x the limit is memory bandwidth.

    Args:
        x: [..., k] float32, bfloat16 or float16 on the CPU; stride 1 in the last dimension, any other strides.
        weight: [panels, k / elements, 16 * bytes] uint8, contiguous; packed by pack_blocks.
        kind: GGML's number of the blocks' kind (q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl,
            iq4_xs, mxfp4), or 1002 to 1005 for int4_32, int4_64, int4_128 and nvfp4; see linear_blocks.
        bias: [16 * panels], dtype of x or float32, or None.
        out: [..., 16 * panels], written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [..., 16 * panels], contiguous, dtype of x. If an element of bfloat16 x is infinite, results that it has a part
        in may be NaN where those of linear_blocks are infinite.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype, stride or kind.
        NotImplementedError: For tensors that are not on the CPU.

    Equivalent to:
        >>> blocks = torch.empty(16 * len(weight), weight.shape[1], weight.shape[2] // 16, dtype=torch.uint8)
        >>> torch_infini.ops.unpack_blocks(blocks, weight, kind)
        >>> y = torch_infini.ops.linear_blocks(x, blocks, kind, bias)

    Source: see linear_blocks; Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 34(3),
        2008, for panels.
    """
    op = torch.ops.infini.linear_block_panels
    return op.default(x, weight, kind, bias) if out is None else op.out(x, weight, kind, bias, out=out)


def fake(x: Tensor, weight: Tensor, kind: int, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], PANEL * weight.shape[0]))


SPEC = OpSpec(linear_block_panels, fake=fake, contiguous=("weight",), devices=("cpu",))
