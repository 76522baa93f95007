"""The ops that models consist of, and those of torch.nn.functional.

All take `out`, written and returned; while a graph is recorded, calls are noted.
"""

from ... import _aten_functional
from ..._aten_functional import *  # noqa: F403
from .activation import silu, swiglu
from .embedding import embedding
from .linear import linear
from .norm import causal_softmax, rms_norm
from .random_sample import random_sample
from .rope import RopeAlgo, rope

__all__ = [
    "RopeAlgo",
    "causal_softmax",
    "embedding",
    "linear",
    "random_sample",
    "rms_norm",
    "rope",
    "silu",
    "swiglu",
    *_aten_functional.__all__,
]
