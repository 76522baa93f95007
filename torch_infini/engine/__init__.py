"""The engine: continuous batching of many requests on one model, over one paged KV cache.

Read it in the order of sequence.py, blocks.py, scheduler.py, decode.py, runner.py, engine.py; LLM and AsyncLLM are its
front ends.
"""

from .async_llm import AsyncLLM
from .blocks import BlockManager
from .config import EngineConfig
from .engine import Engine
from .llm import LLM
from .lora import LoRARequest
from .outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    Metrics,
    RequestMetrics,
    RequestOutput,
    RequestOutputKind,
    ScoringOutput,
    ScoringRequestOutput,
    TokenLogprobs,
)
from .pooling import PoolingParams, ScoreParams
from .sampler import Row, Sampled, Sampler
from .sampling_params import SamplingParams
from .speculation import SpeculativeConfig
from .structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BlockManager",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineConfig",
    "LoRARequest",
    "Logprob",
    "Metrics",
    "PoolingParams",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "Row",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "ScoreParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SpeculativeConfig",
    "StructuredOutputsParams",
    "TokenLogprobs",
]
