"""w4a16: the weights of int4, multiplied by x in its own dtype, as most quantized checkpoints mean them."""

from __future__ import annotations

from torch import Tensor

from .int4 import Int4


class _W4A16(Int4):
    name, exact, order, op = "w4a16", "", 2, "linear_int4"

    def quantizes_x(self, x: Tensor, same_bits: bool) -> bool:
        return False


FORMAT = _W4A16()
