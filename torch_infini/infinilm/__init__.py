"""torch_infini.infinilm: the surface that scripts for InfiniLM know, on torch_infini's models and engine.

`from torch_infini.infinilm.lib import _infinilm` is the low-level engine: the caller brings weights, lengths, blocks.
infer_engine has generate, and llm continues many prompts at a time.
"""

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

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "AutoConfig",
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
