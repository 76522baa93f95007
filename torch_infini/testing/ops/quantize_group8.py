"""quantize_group8: as quantize_table4, with its own layout."""

from __future__ import annotations

from ...ops._panels import GROUP8
from ...ops.quantize_group8 import SPEC
from .quantize_table4 import Quantize

INFO = Quantize(SPEC, GROUP8).info
