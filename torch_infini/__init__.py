"""The Python package: the Infini kernels for LLaMA-type inference as torch ops, and the interfaces built on them.

The import makes torch.ops.infini.<name>, documented as torch_infini.ops.<name>, and torch.distributed's backend
"infiniccl". Every other part (torch_infini.patch, .engine, .compile ...) is loaded when it is first asked for.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import distributed, ops
from ._core.import_hooks import after_import
from ._core.left_out import HAS_COMPAT
from ._core.library import cpu_capabilities, cpu_capability

if TYPE_CHECKING:
    from . import (
        checkpoints,
        compat,
        compile,
        demo,
        device,
        engine,
        models,
        nn,
        patch,
        runtime,
        testing,
        weights,
    )
    from .engine import LLM, AsyncLLM, Engine, EngineConfig, LoRARequest, SamplingParams, StructuredOutputsParams
    from .patch import (
        InfiniConfig,
        PatchReport,
        describe,
        is_patched,
        load_patched,
        patch_model,
        patched,
        save_patched,
        unpatch_model,
    )
    from .patch import load_model as load

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "Engine",
    "EngineConfig",
    "InfiniConfig",
    "LoRARequest",
    "PatchReport",
    "SamplingParams",
    "StructuredOutputsParams",
    "checkpoints",
    "compat",
    "compile",
    "cpu_capabilities",
    "cpu_capability",
    "demo",
    "describe",
    "device",
    "distributed",
    "engine",
    "is_patched",
    "load",
    "load_patched",
    "models",
    "nn",
    "ops",
    "patch",
    "patch_model",
    "patched",
    "runtime",
    "save_patched",
    "testing",
    "unpatch_model",
    "weights",
]

if not HAS_COMPAT:
    __all__.remove("compat")

# The parts whose names stand here, and the names that differ.
_PARTS = {
    "engine": ("LLM", "AsyncLLM", "Engine", "EngineConfig", "LoRARequest", "SamplingParams", "StructuredOutputsParams"),
    "patch": (
        "InfiniConfig",
        "PatchReport",
        "describe",
        "is_patched",
        "load",
        "load_patched",
        "patch_model",
        "patched",
        "save_patched",
        "unpatch_model",
    ),
}
_RENAMED = {"load": "load_model"}


def __getattr__(name: str) -> Any:
    for part, names in _PARTS.items():
        if name in names:
            found = getattr(import_module(f".{part}", __name__), _RENAMED.get(name, name))
            globals()[name] = found
            return found
    # serve is not in __all__, for it needs packages of an extra; compat may be left out, which its import says.
    if name in __all__ or name in ("serve", "compat"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def _register_quantizer(registry: ModuleType) -> None:
    """Let transformers' from_pretrained open folders of save_patched."""
    if hasattr(registry, "register_quantizer"):  # of transformers 5
        from .patch.files import hugging_face  # noqa: F401


after_import("transformers.quantizers.auto", _register_quantizer)
