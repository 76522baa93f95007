"""torch_infini: the Infini kernels for LLaMA-type inference, as torch ops and behind the doors built on them.

torch_infini.ops.<name> are the documented ops (torch.ops.infini.<name>); `python -m torch_infini ops` lists them.
torch_infini.quantize makes the weights of the quantised ones.
"""

from . import ops, quantize
from ._library import cpu_capabilities, cpu_capability
from .patch import PatchReport, patch_model, unpatch_model

__version__ = "0.1.0"
__all__ = ["PatchReport", "cpu_capabilities", "cpu_capability", "ops", "patch_model", "quantize", "unpatch_model"]
