"""conv: convolution in one, two or three dimensions, as in vision and audio towers.

The kernel is csrc/infiniop/conv; on the CPU it multiplies by gemm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._registry import OpSpec

Ints = int | Sequence[int]


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Slide kernels over x and sum the products, as torch.nn.functional.conv1d, conv2d and conv3d do without groups.

    y[i, o, p] = bias[o] + the sum over c and j of weight[o, c, j] * x[i, c, p * stride - padding + j * dilation], where
    x is 0 outside of its shape; p and j have one component per spatial dimension. The weight has two more dimensions
    than there are spatial ones. Summed as in matmul, in float32 with one rounding.

    Args:
        x: [N, Cin, in...] or one image [Cin, in...], float32, bfloat16 or float16; any strides.
        weight: [Cout, Cin, kernel...], dtype of x; any strides. The CPU copies a weight whose channels and kernels are
            not contiguous.
        bias: [Cout], dtype of x, or None.
        stride: Step of the kernel in x: a number, or one for each spatial dimension; at least 1.
        padding: Zeros before and after x, a number or one per dimension; at least 0. The function, but not the op, also
            takes "valid" (0) and "same" (keeps the size of x at stride 1), if that means the same number before and
            after.
        dilation: Step within the kernel, a number or one per dimension; at least 1.
        out: Written and returned instead of a new tensor; any strides (on the CPU through a copy, unless the spatial
            dimensions are contiguous); must not share memory with the arguments.

    Returns:
        [N, Cout, out...] or [Cout, out...], contiguous, dtype of x, with
        out = (in + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1.

    Raises:
        RuntimeError: For an unsupported rank, shape or dtype, or numbers out of range.

    Equivalent to:
        >>> function = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.dim()]
        >>> y = function(x, weight, bias, stride, padding, dilation)

    On the CPU, ATen (oneDNN) computes convolutions that it computes faster, as with dense products: from the number of
    output channels on that `python -m torch_infini env` shows and `tune` measures.

    Source: Chellapilla, Puri and Simard, High Performance Convolutional Neural Networks for Document Processing, 2006,
        for convolution as a matrix product, here tile by tile.
    """
    if isinstance(padding, str):
        padding = padding_of(padding, weight, stride, dilation)
    parameters = listed(stride), listed(padding), listed(dilation)
    op = torch.ops.infini.conv
    return op.default(x, weight, bias, *parameters) if out is None else op.out(x, weight, bias, *parameters, out=out)


def listed(value: Ints) -> list[int]:
    """Return a list: the op also takes a number, but not one that torch.compile keeps as a symbol."""
    return [value] if isinstance(value, int | torch.SymInt) else list(value)


def numbers(value: Ints, spatial: int) -> list[int]:
    """Return the value for each spatial dimension."""
    values = listed(value)
    return values * spatial if len(values) == 1 else values


def padding_of(name: str, weight: Tensor, stride: Ints, dilation: Ints) -> list[int]:
    """Return the numbers that F.conv's "valid" and "same" mean."""
    rule = "infini::conv: padding must "
    if name not in ("valid", "same"):
        raise RuntimeError(f'{rule}be numbers, "valid" or "same", got "{name}"')
    spatial = weight.dim() - 2
    if name == "valid":
        return [0] * spatial
    if any(s != 1 for s in numbers(stride, spatial)):
        raise RuntimeError(f'{rule}not be "same" where stride is not 1, got stride {stride}')
    around = [d * (k - 1) for d, k in zip(numbers(dilation, spatial), weight.shape[2:], strict=True)]
    if any(total % 2 for total in around):
        raise RuntimeError(f'{rule}be as much before as after x, got "same" for {around} zeros in all')
    return [total // 2 for total in around]


def fake(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Ints = 1, padding: Ints = 0, dilation: Ints = 1
) -> Tensor:
    spatial = weight.dim() - 2
    parameters = (numbers(value, spatial) for value in (stride, padding, dilation))
    sizes = zip(x.shape[-spatial:], weight.shape[2:], *parameters, strict=True)
    out = [(size + 2 * p - d * (kernel - 1) - 1) // s + 1 for size, kernel, s, p, d in sizes]
    return x.new_empty((*x.shape[: -spatial - 1], weight.shape[0], *out))


SPEC = OpSpec(
    conv,
    schema="(Tensor x, Tensor weight, Tensor? bias=None, int[1] stride=1, int[1] padding=0, int[1] dilation=1)"
    " -> Tensor",
    fake=fake,
)
