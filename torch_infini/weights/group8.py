"""group8: int8 with a scale for each 16 columns: 8.5 bits a weight. The op is infini::linear_group8.

On the CPU it is what models take for weights="int8".
"""

from __future__ import annotations

from ..ops._panels import GROUP8
from ._panels import PanelFormat


class _Group8(PanelFormat):
    name, serves, panels = "group8", "int8", GROUP8


FORMAT = _Group8()
