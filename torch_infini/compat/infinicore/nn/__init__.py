"""Modules with torch.nn's names and behaviour, made of infinicore tensors."""

from . import functional
from .modules import Embedding, Linear, Module, ModuleList, RMSNorm, RoPE
from .parameter import Parameter

__all__ = ["Embedding", "Linear", "Module", "ModuleList", "Parameter", "RMSNorm", "RoPE", "functional"]
