"""Runs a transformers model over the engine's paged KV cache: PagedModel."""

from .model import PagedModel, check_model, is_causal, load_paged

__all__ = ["PagedModel", "check_model", "is_causal", "load_paged"]
