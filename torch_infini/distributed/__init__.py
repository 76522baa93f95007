"""Ranks that share a model: who they are, and the processes that a program starts for them."""

from .workers import Workers, share

__all__ = ["Workers", "share"]
