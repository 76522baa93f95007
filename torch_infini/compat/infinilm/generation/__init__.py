"""infinilm.generation: token after token with models that are written in Python."""

from .utils import GenerationMixin, infini_to_numpy

__all__ = ["GenerationMixin", "infini_to_numpy"]
