"""infinilm.llm.scheduler: the engine's Scheduler under InfiniLM's name.

Its schedule() returns a list of ScheduledChunk, so that SchedulerOutput has nothing to hold.
"""

from __future__ import annotations

from typing import Any

from ...engine.scheduler import ScheduledChunk, Scheduler

__all__ = ["ScheduledChunk", "Scheduler", "SchedulerOutput"]


class SchedulerOutput:
    """A name that scripts import.

    Raises:
        NotImplementedError: If it is instantiated.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "torch_infini.infinilm.llm.SchedulerOutput: it must not be instantiated, for Scheduler.schedule returns a "
            "list of ScheduledChunk; LLMEngine.metrics counts what was scheduled"
        )
