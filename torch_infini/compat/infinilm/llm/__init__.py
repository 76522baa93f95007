"""infinilm.llm: prompts in, texts out, with InfiniLM's names and arguments, on torch_infini.engine.

LLM is for scripts, LLMEngine for callers that run its steps themselves, AsyncLLMEngine for servers.
"""

from .async_engine import AsyncLLMEngine
from .cache_manager import Block, BlockManager
from .config import EngineConfig
from .engine import LLMEngine
from .llm import LLM
from .request import CompletionOutput, FinishReason, InferenceRequest, RequestOutput, RequestStatus, TokenOutput
from .sampling_params import SamplingParams
from .scheduler import Scheduler, SchedulerOutput

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "Block",
    "BlockManager",
    "CompletionOutput",
    "EngineConfig",
    "FinishReason",
    "InferenceRequest",
    "LLMEngine",
    "RequestOutput",
    "RequestStatus",
    "SamplingParams",
    "Scheduler",
    "SchedulerOutput",
    "TokenOutput",
]
