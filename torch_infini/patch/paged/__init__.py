"""Runs a transformers model in the engine: PagedModel over the paged KV cache, OwnCacheModel over transformers' own."""

from .causal_model import check_model
from .model import PagedModel
from .own_cache import OwnCacheModel
from .serve import is_causal, load_served_model, serve

__all__ = ["OwnCacheModel", "PagedModel", "check_model", "is_causal", "load_served_model", "serve"]
