"""linear_blocks: the product with a weight in blocks, as GGUF files and checkpoints in FP8, MXFP4 and NF4 have it.

The kernels are in csrc/infiniop/linear_blocks; ops/_blocks has the kinds of block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._blocks import KINDS
from ._registry import OpSpec


def linear_blocks(
    x: Tensor, weight: Tensor, kind: str | int, bias: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Multiply the rows of x by a transposed weight in blocks, and add the bias.

    Each block holds a run of a row's elements with its own scales, in the bytes of a checkpoint: q8_0 is a float16
    scale and 32 int8, q6_k 256 elements of 6 bits with int8 scales of 16, fp8 a float32 scale and 128 E4M3 codes. An
    element is decoded to float32, rounded once; products are summed in float32, in an order that depends on k alone, so
    that a row gives the same bits whatever the thread count and the other rows of the call; the result is rounded once.

    Where the CPU multiplies bfloat16 in pairs (AVX-512 BF16, Arm's BF16) or in tiles (AMX), elements are rounded to
    bfloat16 for such x, and the results have the bits of linear with that weight. In tiles the weight is decoded to
    memory first, a slice at a time, which makes a few rows slower than with a dense weight.

    The weight has 2.6 (q2_k) to 8.5 (q8_0) bits an element. With few rows of x the limit is memory bandwidth if there
    are enough threads to decode that fast, otherwise decoding.

    Args:
        x: [..., k] float32, bfloat16 or float16; stride 1 in the last dimension, any other strides.
        weight: [n, k / elements, bytes] uint8, k a multiple of the kind's elements; the blocks of a row adjacent, any
            row stride, any address.
        kind: A name of GGML's types in lower case: q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl,
            iq4_xs, mxfp4; or fp8 or nf4, where a block is a float32 scale, then 128 codes of E4M3, or 64 of
            NormalFloat4, the first of each two in the upper half of their byte; or int4_32, int4_64 or int4_128, a
            scale and a zero point in float16, then codes of 4 bits, of each 64 (or 32) the first half in the lower
            halves of the bytes; or nvfp4, a float32 factor, 8 scales of E4M3 that it multiplies, and 128 codes of E2M1,
            of each 32 the first half in the lower halves of the bytes. Or its number, which
            torch.ops.infini.linear_blocks takes: GGML's, and 1000 to 1005 for ours, in this order.
        bias: [n], dtype of x or float32, or None.
        out: [..., n], written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [..., n], contiguous, dtype of x.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride.
        ValueError: For an unknown name of a kind.
        NotImplementedError: On CUDA, for a kind that has no kernel there.

    Equivalent to:
        >>> from torch_infini.ops._blocks import KINDS
        >>> w = next(one for one in KINDS.values() if kind in (one.name, one.number)).dequantize(weight)
        >>> b = None if bias is None else bias.float()
        >>> y = torch.nn.functional.linear(x.float(), w, b).to(x.dtype)

    Source: the GGUF specification of the ggml project, for the layouts of its types; Dettmers et al., QLoRA, NeurIPS
        2023, for NF4; Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    if isinstance(kind, str) and kind not in KINDS:
        raise ValueError(f"infini::linear_blocks: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    op, number = torch.ops.infini.linear_blocks, KINDS[kind].number if isinstance(kind, str) else kind
    return op.default(x, weight, number, bias) if out is None else op.out(x, weight, number, bias, out=out)


def fake(x: Tensor, weight: Tensor, kind: int, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


SPEC = OpSpec(
    linear_blocks,
    schema="(Tensor x, Tensor weight, int kind, Tensor? bias=None) -> Tensor",
    fake=fake,
    contiguous=("weight",),
)
