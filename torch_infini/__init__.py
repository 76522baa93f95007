"""torch_infini: the Infini kernels for LLaMA-type inference, as torch ops and behind the doors built on them.

torch_infini.ops.<name> are the documented ops (torch.ops.infini.<name>); `python -m torch_infini ops` lists them.
torch_infini.LLM serves prompts with models of torch_infini.models, which are made of torch_infini.nn;
torch_infini.quantize makes integer weights; torch_infini.runtime has streams, events, graphs and programs;
torch_infini.distributed is torch.distributed's backend "infiniccl".
"""

import os

from . import checkpoints, compat, compile, demo, distributed, models, nn, ops, quantize, runtime
from ._core.library import cpu_capabilities, cpu_capability
from .engine import LLM, AsyncLLM, Engine, EngineConfig, SamplingParams
from .patch import PatchReport, is_patched, load_patched, patch_model, patched, save_patched, unpatch_model
from .patch import load_model as load

if os.environ.get("INFINI_PROVIDERS"):
    try:
        ops.choose_providers(os.environ["INFINI_PROVIDERS"])
    except ValueError as _error:
        raise ImportError(f"torch_infini: {_error}") from None

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Engine",
    "EngineConfig",
    "PatchReport",
    "SamplingParams",
    "checkpoints",
    "compat",
    "compile",
    "cpu_capabilities",
    "cpu_capability",
    "demo",
    "distributed",
    "is_patched",
    "load",
    "load_patched",
    "models",
    "nn",
    "ops",
    "patch_model",
    "patched",
    "quantize",
    "runtime",
    "save_patched",
    "unpatch_model",
]
