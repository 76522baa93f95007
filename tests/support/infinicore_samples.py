"""Sample calls of the 248 functions that infinicore has beside torch, for tests/test_infinicore_names.py.

SAMPLES[name] makes calls from Values, which draws other numbers of the same shapes for another seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


class Values:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        """From 0.1 to 0.9, where all functions of one number are defined but acosh()."""
        return torch.rand(shape, generator=self._generator) * 0.8 + 0.1

    def signed(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator) * 3

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype)

    def bools(self, *shape: int) -> Tensor:
        return self.ints(0, 2, *shape).bool()

    def order(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self._generator)

    def matrix(self, n: int) -> Tensor:
        """One that is far from singular, and whose determinant is positive."""
        return self(n, n) + n * torch.eye(n)


Maker = Callable[[Values], Call]
SAMPLES: dict[str, Sequence[Maker]] = {}


def add(names: str, *makers: Maker) -> None:
    for name in names.split():
        assert name not in SAMPLES, name
        SAMPLES[name] = makers


def add_functional(names: str, *makers: Maker) -> None:
    add(" ".join(f"nn.functional.{name}" for name in names.split()), *makers)


_S = (2, 3, 5)
_EMPTY: Maker = lambda v: call(v(0, 3))

# One number from one number.
add(
    "acos asin atan atanh asinh cosh deg2rad digamma erf erfc erfinv exp2 expm1 log log10 log1p log2 reciprocal sinh "
    "sqrt square tan",
    lambda v: call(v(*_S)),
    lambda v: call(v(7).double()),
    lambda v: call(v(2, 3).bfloat16()),
    _EMPTY,
)
add("acosh", lambda v: call(v(*_S) + 1))
add("sign", lambda v: call(v.signed(*_S)), lambda v: call(v.ints(-3, 3, 4)), _EMPTY)
add("abs sgn", lambda v: call(v.signed(*_S)), lambda v: call(v.ints(-3, 3, 4)), lambda v: call(v(3) * 1j), _EMPTY)
add("floor trunc", lambda v: call(v.signed(*_S)), lambda v: call(v.ints(-3, 3, 4)), _EMPTY)
add("round", lambda v: call(v.signed(*_S)), lambda v: call(v.signed(4), decimals=1))
add("frac isfinite isneginf isposinf signbit", lambda v: call(v.signed(*_S)), lambda v: call(v.signed(2) / 0), _EMPTY)
add("frexp", lambda v: call(v.signed(*_S)))
add("logical_not", lambda v: call(v.ints(0, 2, *_S)), lambda v: call(v.bools(4)))

# One number from two.
add(
    "atan2 fmax fmin fmod hypot logaddexp logaddexp2 maximum minimum remainder",
    lambda v: call(v.signed(*_S), v.signed(*_S)),
    lambda v: call(v.signed(*_S), v.signed(3, 1)),
    lambda v: call(v.signed(3, 0), v.signed(0)),
)
add("eq gt isclose", lambda v: call(v.ints(0, 2, *_S), v.ints(0, 2, 5)), lambda v: call(v(4).half(), v(4).half()))
add("floor_divide", lambda v: call(v.signed(*_S), v(5)), lambda v: call(v.ints(-9, 9, 4), 4))
add("float_power", lambda v: call(v(*_S), v(5)), lambda v: call(v.ints(1, 9, 4), 2), lambda v: call(2.0, v(3)))
add("gcd", lambda v: call(v.ints(-9, 9, *_S), v.ints(1, 9, 5)))
add("heaviside", lambda v: call(v.signed(*_S).round(), v(5)))
add("ldexp", lambda v: call(v(*_S), v.ints(-3, 3, 5, dtype=torch.int32)))
add("bitwise_left_shift bitwise_right_shift", lambda v: call(v.ints(0, 9, *_S), v.ints(0, 3, 5)))
add("bitwise_xor", lambda v: call(v.ints(0, 9, *_S), v.ints(0, 9, 5)), lambda v: call(v.bools(4), v.bools(4)))
add("logical_and logical_or logical_xor", lambda v: call(v.bools(*_S), v.bools(5)), lambda v: call(v(3), v(3)))

# One number from three.
add("addcdiv addcmul", lambda v: call(v(*_S), v(*_S), v(3, 1), value=0.5), lambda v: call(v(2), v(2), v(2)))
add("lerp", lambda v: call(v(*_S), v(*_S), 0.25), lambda v: call(v(*_S), v(5), v(*_S)))
add("where", lambda v: call(v.bools(*_S), v(*_S), v(5)), lambda v: call(v.bools(3), 1.0, v(3)))

# Reductions.
add(
    "all any",
    lambda v: call(v.bools(*_S)),
    lambda v: call(v.bools(*_S), dim=1),
    lambda v: call(v.bools(*_S), 0, keepdim=True),
)
add("amax amin", lambda v: call(v.signed(*_S)), lambda v: call(v.signed(*_S), dim=(0, 2), keepdim=True))
add("argmax argmin", lambda v: call(v.signed(*_S)), lambda v: call(v.signed(*_S), dim=-1))
add("count_nonzero", lambda v: call(v.ints(0, 2, *_S)), lambda v: call(v.ints(0, 2, *_S), dim=1))
add("logsumexp", lambda v: call(v.signed(*_S), 1), lambda v: call(v.signed(*_S), (0, 1), keepdim=True))
add("max min", lambda v: call(v.signed(*_S)), lambda v: call(v.signed(*_S), 1), lambda v: call(v(2, 3), v(3)))
add("median", lambda v: call(v.signed(*_S)), lambda v: call(v.signed(*_S), dim=1))
add("mean", lambda v: call(v(*_S)), lambda v: call(v(*_S), (0, 1)), lambda v: call(v(3), dtype=torch.float64))
add("sum", lambda v: call(v(*_S)), lambda v: call(v.ints(0, 9, *_S), (0, 1)), lambda v: call(v(3), dtype=torch.float64))
add("prod", lambda v: call(v(*_S)), lambda v: call(v(*_S), 1, keepdim=True))
add("quantile", lambda v: call(v(*_S), 0.3), lambda v: call(v(*_S), v(2), dim=1))
add("std var std_mean var_mean", lambda v: call(v(*_S)), lambda v: call(v(*_S), dim=1, correction=0))
add("kthvalue", lambda v: call(v(*_S), 2), lambda v: call(v(*_S), 2, dim=1, keepdim=True))

# Along a dimension, sorting, counting.
add("cummax cummin cumprod cumsum logcumsumexp", lambda v: call(v(*_S), 1), lambda v: call(v(*_S), dim=-1))
add("diff", lambda v: call(v(*_S)), lambda v: call(v(*_S), n=2, dim=2, prepend=v(2, 3, 1)))
add("argsort", lambda v: call(v(*_S)), lambda v: call(v(*_S), dim=1, descending=True))
add("sort", lambda v: call(v(*_S)), lambda v: call(v(*_S), dim=1, descending=True, stable=True))
add("msort", lambda v: call(v(*_S)))
add("topk", lambda v: call(v(*_S), 2), lambda v: call(v(*_S), 2, dim=1, largest=False))
add("bucketize", lambda v: call(v(*_S), v(4).sort()[0]), lambda v: call(v(3), v(4).sort()[0], out_int32=True))
add("bincount", lambda v: call(torch.cat([v.ints(0, 5, 9), torch.tensor([5])])))
add("histc", lambda v: call(v(9), 4, 0.0, 1.0), lambda v: call(v(9)))
add("histogram", lambda v: call(v(9), 4), lambda v: call(v(9), v(4).sort()[0]))
add("isin", lambda v: call(v.ints(0, 5, *_S), v.ints(0, 5, 3)), lambda v: call(v.ints(0, 5, 4), 3))
add("unique", lambda v: call(v.order(5)), lambda v: call(v.order(5), return_inverse=True, return_counts=True))
add("argwhere", lambda v: call(v(3, 2)))
add("nonzero", lambda v: call(v(3, 2)), lambda v: call(v(3, 2), as_tuple=True))
add("masked_select", lambda v: call(v(3, 2), v(3, 2) > 0))
add("combinations", lambda v: call(v(4)), lambda v: call(v(4), r=3, with_replacement=True))

# Indices.
add("gather", lambda v: call(v(*_S), 1, v.ints(0, 3, 2, 4, 5)))
add("take", lambda v: call(v(*_S), v.ints(0, 30, 4)))
add("index_select", lambda v: call(v(*_S), 1, v.ints(0, 3, 4)))
add("index_add index_copy", lambda v: call(v(*_S), 1, v.order(3), v(*_S)))
add("index_reduce", lambda v: call(v(*_S), 1, v.order(3), v(*_S), "prod"))
add("scatter", lambda v: call(v(*_S), 1, v.order(3)[None, :, None].expand(2, 3, 5).clone(), v(*_S)))
add("scatter_add", lambda v: call(v(*_S), 1, v.ints(0, 3, 2, 2, 5), v(*_S)))
add("scatter_reduce", lambda v: call(v(*_S), 1, v.ints(0, 3, *_S), v(*_S), "amax"))
add("diagonal_scatter", lambda v: call(v(4, 4), v(4)))
add("select_scatter", lambda v: call(v(*_S), v(2, 5), 1, 2))
add("slice_scatter", lambda v: call(v(*_S), v(2, 2, 5), 1, 1))

# Other shapes of the same numbers.
add("broadcast_to", lambda v: call(v(3, 1), (2, 3, 5)))
add("cat", lambda v: call([v(2, 3), v(2, 4)], 1), lambda v: call((v(2, 3), v(1, 3))))
add("stack", lambda v: call([v(2, 3), v(2, 3)], 1))
add("block_diag", lambda v: call(v(2, 3), v(3, 1)))
add("diag", lambda v: call(v(4)), lambda v: call(v(4, 5), 1))
add("diag_embed diagflat", lambda v: call(v(2, 3)), lambda v: call(v(2, 3), -1))
add("diagonal", lambda v: call(v(4, 5)), lambda v: call(v(2, 4, 5), 1, 1, 2))
add("flip", lambda v: call(v(*_S), (0, 2)))
add("fliplr flipud", lambda v: call(v(*_S)))
add("hsplit", lambda v: call(v(2, 6), 3), lambda v: call(v(2, 6), (1, 4)))
add("narrow_copy", lambda v: call(v(*_S), 1, 1, 2))
add("reshape", lambda v: call(v(*_S), (6, -1)), lambda v: call(v(3, 2).t(), (6,)))
add("rot90", lambda v: call(v(*_S)), lambda v: call(v(*_S), 2, (1, 2)))
add("select", lambda v: call(v(*_S), 1, 2), lambda v: call(v(*_S), -1, -1))
add("split", lambda v: call(v(*_S), 2, 2), lambda v: call(v(*_S), [1, 4], dim=2))
add("transpose", lambda v: call(v(*_S), 0, 2))
add("vander", lambda v: call(v(4)), lambda v: call(v(4), 3, increasing=True))

# Tensors from numbers.
add("clone", lambda v: call(v(*_S)), lambda v: call(v.ints(0, 9, 3, 4)), lambda v: call(v(3) * 1j), _EMPTY)
add("empty_strided", lambda v: call((2, 3), (1, 2), dtype=torch.float16))
add("full", lambda v: call((2, 3), 1.5), lambda v: call([4], 3, dtype=torch.int32, device="cpu"))
add("full_like", lambda v: call(v(*_S), 2.5), lambda v: call(v(3), True, dtype=torch.bool))

# Linear algebra.
add(
    "addbmm",
    lambda v: call(v(2, 4), v(5, 2, 3), v(5, 3, 4), beta=0.5, alpha=2),
    lambda v: call(v(1), v(1, 2, 3), v(1, 3, 4)),
)
add("addmv", lambda v: call(v(2), v(2, 3), v(3), beta=0.5, alpha=2), lambda v: call(v(1), v(2, 3), v(3)))
add("addr", lambda v: call(v(2, 3), v(2), v(3), beta=0.5, alpha=2), lambda v: call(v(3), v(2), v(3)))
add(
    "baddbmm",
    lambda v: call(v(5, 2, 4), v(5, 2, 3), v(5, 3, 4), beta=0.5, alpha=2),
    lambda v: call(v(4), v(5, 2, 3), v(5, 3, 4)),
)
add("cdist", lambda v: call(v(4, 3), v(5, 3)), lambda v: call(v(4, 3), v(5, 3), p=1.0))
add("corrcoef", lambda v: call(v(3, 6)))
add("cov", lambda v: call(v(3, 6)), lambda v: call(v(3, 6), correction=0, fweights=v.ints(1, 4, 6)))
add("cross", lambda v: call(v(4, 3), v(4, 3), dim=1), lambda v: call(v(3, 4), v(3, 4), dim=0))
add("det logdet slogdet inverse", lambda v: call(v.matrix(3)), lambda v: call(torch.stack([v.matrix(2), v.matrix(2)])))
add("dist", lambda v: call(v(*_S), v(5)), lambda v: call(v(4), v(4), 1))
add(
    "dot vdot", lambda v: call(v(7), v(7)), lambda v: call(v.ints(0, 9, 7), v.ints(0, 9, 7)), lambda v: call(v(0), v(0))
)
add("inner", lambda v: call(v(7), v(7)), lambda v: call(v(2, 3, 7), v(4, 7)), lambda v: call(v(2, 7), v(2, 4, 7)))
add("kron", lambda v: call(v(2, 3), v(3, 2)))
add("matrix_exp", lambda v: call(v(3, 3)))
add("matrix_power", lambda v: call(v.matrix(3), 3), lambda v: call(v.matrix(3), -1))
add("mv", lambda v: call(v(4, 7), v(7)), lambda v: call(v(7, 4).t(), v(7)), lambda v: call(v(4, 14)[:, ::2], v(7)))
add("pdist", lambda v: call(v(4, 3)))
add("svd", lambda v: call(v(4, 3)), lambda v: call(v(3, 3) + 1j * v(3, 3)))

# Activations.
add_functional(
    "celu elu hardshrink hardsigmoid hardswish leaky_relu logsigmoid mish selu softshrink softsign tanhshrink",
    lambda v: call(v.signed(*_S)),
    lambda v: call(v.signed(7).double()),
)
add_functional("glu", lambda v: call(v.signed(2, 6)), lambda v: call(v.signed(4, 6), 0))
add_functional("hardtanh", lambda v: call(v.signed(*_S)), lambda v: call(v.signed(*_S), -2, 0.5, True), _EMPTY)
add_functional("relu6", lambda v: call(v.signed(*_S) * 3), lambda v: call(v.signed(*_S) * 3, inplace=True), _EMPTY)
add_functional("softplus", lambda v: call(v.signed(*_S) * 9), lambda v: call(v.signed(*_S), 2.0), _EMPTY)
add_functional("threshold", lambda v: call(v.signed(*_S), 0.5, 2.0), lambda v: call(v.signed(*_S), 0.5, 2.0, True))
add_functional("prelu", lambda v: call(v.signed(*_S), v(3)))
add_functional(
    "log_softmax softmin",
    lambda v: call(v.signed(*_S), dim=1),
    lambda v: call(v.signed(*_S), -1),
    lambda v: call(v.signed(*_S), -1, dtype=torch.float64),
)
add_functional("normalize", lambda v: call(v.signed(*_S)), lambda v: call(v.signed(4, 9).half(), p=2.0, dim=-1))

# Norms.
add_functional(
    "batch_norm",
    lambda v: call(v(*_S), v(3), v(3), v(3), v(3)),
    lambda v: call(v(*_S), v(3), v(3), training=True, momentum=0.5),
)
add_functional("group_norm", lambda v: call(v(2, 4, 5), 2, v(4), v(4)))
add_functional("instance_norm", lambda v: call(v(*_S)), lambda v: call(v(*_S), v(3), v(3), v(3), v(3)))
add_functional("local_response_norm", lambda v: call(v(*_S), 2))

# Attention, convolutions, folding.
add_functional(
    "scaled_dot_product_attention",
    lambda v: call(v(2, 4, 5, 8), v(2, 4, 6, 8), v(2, 4, 6, 8)),
    lambda v: call(v(2, 4, 5, 8), v(2, 2, 5, 8), v(2, 2, 5, 8), is_causal=True, enable_gqa=True),
    lambda v: call(v(2, 4, 5, 8), v(2, 4, 6, 8), v(2, 4, 6, 8), v.signed(5, 6), scale=0.5),
    lambda v: call(v(2, 4, 5, 8), v(2, 4, 6, 8), v(2, 4, 6, 8), is_causal=True),  # torch's: unequal lengths
    lambda v: call(v(4, 5, 8), v(4, 6, 8), v(4, 6, 4)),  # torch's: three dimensions
)
add_functional("bilinear", lambda v: call(v(2, 3), v(2, 4), v(5, 3, 4), v(5)))


def add_windows(n: int) -> None:
    """Those of n dimensions, with a window that moves."""
    k, i = (3,) * n, (7,) * n
    add_functional(
        f"conv{n}d",
        lambda v: call(v(2, 3, *i), v(4, 3, *k), v(4), 2, 1),
        lambda v: call(v(3, *i), v(4, 3, *k), padding="same"),
        lambda v: call(v(2, 4, *i), v(4, 2, *k), dilation=2, groups=2),
    )
    add_functional(f"conv_transpose{n}d", lambda v: call(v(2, 3, *i), v(3, 4, *k), v(4), 2, 1))
    add_functional(f"avg_pool{n}d", lambda v: call(v(2, 3, *i), 3, 2, 1))
    add_functional(f"lp_pool{n}d", lambda v: call(v(2, 3, *i), 2.0, 3))
    add_functional(
        f"max_pool{n}d",
        lambda v: call(v(2, 3, *i), 3, 2),
        lambda v: call(v(2, 3, *i), 3, return_indices=True),
    )
    add_functional(f"adaptive_avg_pool{n}d", lambda v: call(v(2, 3, *i), 3))
    add_functional(
        f"max_unpool{n}d",
        lambda v: call(
            v(2, 3, *(2,) * n), torch.arange(2**n).reshape((1, 1) + (2,) * n).expand(2, 3, *(2,) * n).clone(), 2
        ),
    )


for _n in (1, 2, 3):
    add_windows(_n)
add_functional("adaptive_max_pool1d", lambda v: call(v(2, 3, 7), 3), lambda v: call(v(2, 3, 7), 3, True))
add_functional("adaptive_max_pool2d", lambda v: call(v(2, 3, 7, 7), (3, None)))
add_functional("fold", lambda v: call(v(2, 12, 6), (4, 3), (2, 2)))
add_functional("unfold", lambda v: call(v(2, 3, 4, 3), (2, 2)))
add_functional("pixel_shuffle", lambda v: call(v(2, 8, 3, 3), 2))
add_functional("pixel_unshuffle", lambda v: call(v(2, 2, 4, 6), 2))
add_functional("pad", lambda v: call(v(*_S), (1, 2)), lambda v: call(v(*_S), (1, 2), "reflect"))
add_functional(
    "interpolate", lambda v: call(v(2, 3, 5), 9), lambda v: call(v(2, 3, 4, 4), scale_factor=1.5, mode="bilinear")
)
add_functional("affine_grid", lambda v: call(v(2, 2, 3), [2, 3, 4, 5], align_corners=False))
add_functional("one_hot", lambda v: call(v.ints(0, 4, 5), 4))

# Random.
add_functional("alpha_dropout feature_alpha_dropout", lambda v: call(v(*_S), 0.5, True), lambda v: call(v(*_S)))
add_functional("dropout1d", lambda v: call(v(*_S)), lambda v: call(v(*_S), training=False))
add_functional("dropout2d", lambda v: call(v(2, 3, 4, 4)), lambda v: call(v(2, 3, 4, 4), 0.3, inplace=True))
add_functional("dropout3d", lambda v: call(v(2, 3, 2, 2, 2)))
add_functional(
    "fractional_max_pool2d",
    lambda v: call(v(2, 3, 7, 7), 2, 3),
    lambda v: call(v(2, 3, 7, 7), 2, 3, return_indices=True),
)
add_functional("fractional_max_pool3d", lambda v: call(v(2, 3, 7, 7, 7), 2, 3))
add_functional("gumbel_softmax", lambda v: call(v(*_S)), lambda v: call(v(*_S), hard=True))
add_functional("rrelu", lambda v: call(v.signed(*_S), training=True), lambda v: call(v.signed(*_S)))

# Losses.
add_functional(
    "l1_loss mse_loss smooth_l1_loss huber_loss",
    lambda v: call(v(*_S), v(*_S)),
    lambda v: call(v(3), v(3), reduction="none"),
)
add_functional(
    "binary_cross_entropy binary_cross_entropy_with_logits",
    lambda v: call(v(*_S), v(*_S)),
    lambda v: call(v(3), v(3), v(3), reduction="none"),
)
add_functional("cosine_embedding_loss", lambda v: call(v(4, 3), v(4, 3), v.bools(4) * 2 - 1))
add_functional("cosine_similarity pairwise_distance", lambda v: call(v(4, 3), v(4, 3)))
add_functional(
    "cross_entropy", lambda v: call(v(4, 5), v.ints(0, 5, 4)), lambda v: call(v(4, 5), v(4, 5), label_smoothing=0.1)
)
add_functional("nll_loss", lambda v: call(v(4, 5), v.ints(0, 5, 4), v(5)))
add_functional("gaussian_nll_loss", lambda v: call(v(*_S), v(*_S), v(*_S)))
add_functional("hinge_embedding_loss soft_margin_loss", lambda v: call(v(*_S), v.bools(*_S) * 2.0 - 1))
add_functional("kl_div", lambda v: call(v(*_S).log(), v(*_S), reduction="batchmean"))
add_functional("margin_ranking_loss", lambda v: call(v(4), v(4), v.bools(4) * 2 - 1))
add_functional("multilabel_margin_loss", lambda v: call(v(2, 4), v.ints(0, 4, 2, 4)))
add_functional("multilabel_soft_margin_loss", lambda v: call(v(2, 4), v.bools(2, 4).float()))
add_functional(
    "triplet_margin_loss triplet_margin_with_distance_loss",
    lambda v: call(v(4, 3), v(4, 3), v(4, 3)),
    lambda v: call(v(4, 3), v(4, 3), v(4, 3), margin=0.5, swap=True),
)
