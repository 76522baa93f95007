"""infinilm.generation: token-by-token generation with models written in Python."""

from .utils import GenerationMixin, infini_to_numpy

__all__ = ["GenerationMixin", "infini_to_numpy"]
