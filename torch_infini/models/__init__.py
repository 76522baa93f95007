"""Whole models made of torch_infini.nn, and their loading from checkpoints. decoder.py is where to begin."""

from .checkpoint import Slot, load_checkpoint
from .config import LlamaConfig
from .decoder import Decoder
from .llama import Llama

__all__ = ["Decoder", "Llama", "LlamaConfig", "Slot", "load_checkpoint"]
