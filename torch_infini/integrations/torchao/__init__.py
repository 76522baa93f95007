"""torch_infini in torchao: configs for `torchao.quantize_` that give linear layers weights in this library's formats.

pip install 'torch_infini[torchao]'. docs/torchao.md begins with an example.
"""

try:
    import torchao
except ModuleNotFoundError as error:
    raise ImportError(
        "torch_infini.integrations.torchao: torchao must be installed (pip install 'torch_infini[torchao]'), got "
        f"{error}"
    ) from error

from .configs import InfiniInt4Config, InfiniInt8Config
from .tensor import InfiniTensor

__all__ = ["InfiniInt4Config", "InfiniInt8Config", "InfiniTensor"]
del torchao
