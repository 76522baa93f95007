"""torch_infini: the Infini kernels for LLaMA-type inference, as torch ops and behind the doors built on them.

torch_infini.ops.<name> are the documented ops (torch.ops.infini.<name>); `python -m torch_infini ops` lists them.
torch_infini.quantize makes the weights of the quantised ones; torch_infini.runtime has streams, events and graphs.
"""

import os

from . import compile, ops, quantize, runtime
from ._library import cpu_capabilities, cpu_capability
from .patch import PatchReport, load_patched, patch_model, patched, save_patched, unpatch_model

if os.environ.get("INFINI_LOG"):
    from . import _logging

    _logging.start(os.environ["INFINI_LOG"])

__version__ = "0.1.0"
__all__ = [
    "PatchReport",
    "compile",
    "cpu_capabilities",
    "cpu_capability",
    "load_patched",
    "ops",
    "patch_model",
    "patched",
    "quantize",
    "runtime",
    "save_patched",
    "unpatch_model",
]
