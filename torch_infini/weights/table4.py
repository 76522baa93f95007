"""table4: 4-bit indices into a table, a scale per 16 columns: 4.5 bits per weight. The op is infini::linear_table4.

Models on the CPU use it for weights="int4": with as many bits its error is 0.7 of int4's.
"""

from __future__ import annotations

from ..ops._panels import TABLE4
from ._panels import PanelFormat


class _Table4(PanelFormat):
    name, serves, panels = "table4", "int4", TABLE4


FORMAT = _Table4()
