"""linear_group8: as linear_table4, with its own layout."""

from __future__ import annotations

from ...ops._panels import GROUP8
from ...ops.linear_group8 import SPEC
from .linear_table4 import Linear

INFO = Linear(SPEC, GROUP8, 128).info  # -128, which quantize_group8 never writes
