"""The patterns that backend="infini" looks for: each module finds its sites in a graph and replaces them.

Every module has NAMES (what it counts in the report) and `apply(graph, report, wanted)`. The order matters: a norm is
found while its additions are still there, attention after the rotary embeddings it reads.
"""

from __future__ import annotations

from . import attention, linear, rms_norm, rope, swiglu

PATTERNS = (rms_norm, rope, attention, swiglu, linear)
NAMES = tuple(name for pattern in PATTERNS for name in pattern.NAMES)

__all__ = ["NAMES", "PATTERNS"]
