"""group8: int8 with a scale per 16 columns, 8.5 bits per weight. The op is infini::linear_group8.

Models on the CPU use it for weights="int8".
"""

from __future__ import annotations

from ..ops._panels import GROUP8
from ._panels import PanelFormat


class _Group8(PanelFormat):
    name, serves, panels = "group8", "int8", GROUP8


FORMAT = _Group8()
