"""w8a16: the weights of int8, multiplied by x in its own dtype, as most quantized checkpoints mean them."""

from __future__ import annotations

from torch import Tensor

from .int8 import Int8


class _W8A16(Int8):
    name, exact, order, op = "w8a16", "", 2, "linear_int8"

    def quantizes_x(self, x: Tensor, same_bits: bool) -> bool:
        return False


FORMAT = _W8A16()
