"""infinilm.llm.scheduler: the engine's Scheduler under InfiniLM's name."""

from __future__ import annotations

from ...engine.scheduler import ScheduledChunk, Scheduler
from .import_only import ImportOnly

__all__ = ["ScheduledChunk", "Scheduler", "SchedulerOutput"]


class SchedulerOutput(ImportOnly):
    """A name that scripts import: schedule() returns a list of ScheduledChunk."""

    reason = "Scheduler.schedule returns a list of ScheduledChunk; LLMEngine.metrics counts what was scheduled"
