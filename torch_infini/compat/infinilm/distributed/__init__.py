"""infinilm.distributed: the devices of a tensor-parallel model."""

from .dist_config import DistConfig

__all__ = ["DistConfig"]
