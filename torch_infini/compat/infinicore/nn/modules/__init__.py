"""The modules: the base class, the list, and the layers that models consist of."""

from .linear import Linear
from .module import Module
from .module_list import ModuleList
from .normalization import RMSNorm
from .rope import RoPE
from .sparse import Embedding

__all__ = ["Embedding", "Linear", "Module", "ModuleList", "RMSNorm", "RoPE"]
