"""InfiniLM's Python interface on torch_infini's models and engine, for scripts written for InfiniLM.

`from infinilm.lib import _infinilm` is the low-level engine: the caller provides weights, lengths and blocks.
infer_engine has generate; llm continues many prompts at a time.
"""

from typing import TYPE_CHECKING, Any

from .auto_config import AutoConfig
from .lib._infinilm import (
    CacheConfig,
    Config,
    DistConfig,
    HookRegistry,
    InferEngine,
    LlamaConfig,
    PagedKVCacheConfig,
    StaticKVCacheConfig,
)
from .llm import LLM, AsyncLLMEngine, RequestOutput, SamplingParams, TokenOutput

if TYPE_CHECKING:
    from .models.llama import AutoLlamaModel

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "AutoConfig",
    "AutoLlamaModel",
    "CacheConfig",
    "Config",
    "DistConfig",
    "HookRegistry",
    "InferEngine",
    "LlamaConfig",
    "PagedKVCacheConfig",
    "RequestOutput",
    "SamplingParams",
    "StaticKVCacheConfig",
    "TokenOutput",
]


def __getattr__(name: str) -> Any:
    if name == "AutoLlamaModel":  # needs infinicore's module for this Python, unlike the names above
        from .models.llama import AutoLlamaModel

        return AutoLlamaModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
