"""Whole models made of torch_infini.nn, and their loading from checkpoints. llama.py is where to begin."""

from .checkpoint import Slot, load_checkpoint
from .config import LlamaConfig
from .llama import Llama

__all__ = ["Llama", "LlamaConfig", "Slot", "load_checkpoint"]
