"""The engine for prompts in and texts out, under InfiniLM's names.

The classes are torch_infini.engine's, with its arguments.
"""

from ..engine import LLM, BlockManager, EngineConfig, SamplingParams
from ..engine import AsyncLLM as AsyncLLMEngine
from ..engine import Engine as LLMEngine
from ..engine.scheduler import Scheduler

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "BlockManager",
    "EngineConfig",
    "LLMEngine",
    "SamplingParams",
    "Scheduler",
]
