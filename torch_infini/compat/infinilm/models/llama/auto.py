"""AutoLlamaModel and LlamaForCausalLM: InfiniLM's earlier names for an engine of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...cache import CacheConfig
from ...distributed import DistConfig
from ...infer_engine import InferEngine


class LlamaForCausalLM(InferEngine):
    """An InferEngine for a LlamaConfig or a model folder; arguments, methods and errors are the engine's."""


class AutoLlamaModel:
    """Makes engines of model folders."""

    @staticmethod
    def from_pretrained(
        model_path: str | Path,
        device: Any = None,
        dtype: Any = None,
        backend: str = "cpp",
        distributed_config: DistConfig | None = None,
        cache_config: CacheConfig | None = None,
    ) -> LlamaForCausalLM:
        """Make an engine with the parameters of a model folder; arguments and errors as InferEngine.from_pretrained."""
        return LlamaForCausalLM.from_pretrained(model_path, device, dtype, backend, distributed_config, cache_config)
