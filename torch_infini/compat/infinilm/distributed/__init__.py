"""infinilm.distributed: the devices that share a model."""

from .dist_config import DistConfig

__all__ = ["DistConfig"]
