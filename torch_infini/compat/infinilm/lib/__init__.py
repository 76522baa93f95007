"""torch_infini.compat.infinilm.lib: where InfiniLM's scripts look for `_infinilm`."""

from . import _infinilm

__all__ = ["_infinilm"]
