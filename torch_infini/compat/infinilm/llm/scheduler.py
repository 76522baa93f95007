"""infinilm.llm.scheduler: the engine's Scheduler with InfiniLM's name, and the result of LLMEngine.scheduler."""

from __future__ import annotations

from ....engine import BlockManager
from ....engine.scheduler import ScheduledChunk, Scheduler
from ....engine.sequence import Sequence
from .import_only import ImportOnly

__all__ = ["ScheduledChunk", "Scheduler", "SchedulerOutput", "SchedulerView"]


class SchedulerView:
    """The state of an engine's Scheduler with EngineConfig's terms, to be read between steps.

    Args:
        scheduler: The engine's Scheduler.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that have not started or were preempted; the first is scheduled first."""
        return list(self._scheduler.waiting)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that have blocks, in the order of their requests."""
        return list(self._scheduler.running)

    @property
    def preemptions(self) -> int:
        """The number of preemptions so far."""
        return self._scheduler.preemptions

    @property
    def cache_manager(self) -> BlockManager:
        """The allocator of the cache's blocks; `free` and `kept` count free and cached blocks."""
        return self._scheduler.blocks

    @property
    def max_batch_size(self) -> int:
        """The most sequences that run at a time."""
        return self._scheduler.max_num_seqs

    @property
    def num_blocks(self) -> int:
        """The cache's blocks."""
        return self._scheduler.blocks.blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._scheduler.blocks.block_size


class SchedulerOutput(ImportOnly):
    """Exists for scripts that import it: schedule() returns a list of ScheduledChunk."""

    reason = "Scheduler.schedule returns a list of ScheduledChunk; LLMEngine.metrics counts what was scheduled"
