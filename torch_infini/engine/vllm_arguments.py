"""Arguments of vLLM's LLM that EngineConfig lacks: why they have no effect here, or what to use instead."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from .config import EngineConfig

_NAME = "torch_infini.LLM"
_logger = logging.getLogger("torch_infini")

# Accepted with any value; why they have no effect.
WITHOUT_EFFECT = {
    "async_scheduling": "a step is scheduled after the previous one is done",
    "block_pool_size": "the cache has cache_blocks blocks",
    "compilation_config": "decode steps are recorded, and nothing is compiled",
    "config_format": "config.json and GGUF are detected",
    "cpu_offload_gb": "the model runs where `device` says",
    "cuda_graph_sizes": "a graph is recorded for each number of sequences",
    "disable_custom_all_reduce": "ranks reduce through infiniccl",
    "disable_log_stats": "metrics() has the counts",
    "distributed_executor_backend": "ranks are processes, or those of torchrun",
    "enable_chunked_prefill": "prompts are always computed in chunks",
    "fully_sharded_loras": "adapters are sharded as the layers that they change",
    "load_format": "the format of a checkpoint is detected from its files",
    "max_cpu_loras": "an adapter is read from its folder when it gets a slot",
    "max_seq_len_to_capture": "decode steps of every length are recorded",
    "num_gpu_blocks_override": "give cache_blocks",
    "preemption_mode": "a preempted sequence is computed again",
    "revision": "the revision in the hub's cache is used",
    "scheduling_policy": "first come, first served",
    "swap_space": "a preempted sequence is computed again",
    "tokenizer_mode": "the tokenizer is the one that transformers loads",
    "tokenizer_revision": "the revision in the hub's cache is used",
    "use_v2_block_manager": "there is one block manager",
}
# Rejected unless the value is in NEUTRAL; what to do instead.
REJECTED = {
    "data_parallel_size": "start several processes, each with an LLM",
    "draft_model": "give speculative_config={'model': ..., 'num_speculative_tokens': ...}",
    "hf_overrides": "change config.json, or load the model and pass it, LLM(model)",
    "lora_modules": "give a LoRARequest to generate()",
    "override_generation_config": "give SamplingParams to generate()",
    "pipeline_parallel_size": "use tensor_parallel_size",
    "rope_scaling": "change rope_parameters in config.json",
    "rope_theta": "change rope_parameters in config.json",
    "skip_tokenizer_init": "use Engine, whose tokenizer may be None",
    "task": "every model embeds, and decoders generate; runner says which of both a model is loaded for",
    "trust_remote_code": "code of a folder (auto_map) is never run: load model and tokenizer yourself, and pass them",
}
NEUTRAL: tuple[Any, ...] = (None, False, 1, "auto", "generate", "embed", "embedding", {}, [])  # request no feature


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """Make the EngineConfig of LLM's further arguments.

    Args:
        settings: Fields of EngineConfig, and arguments of vLLM's LLM. kv_cache_dtype may be "auto".

    Raises:
        ValueError: For a rejected value, or an unknown name; the message has the nearest known one.
    """
    known = {field.name for field in fields(EngineConfig)}
    own: dict[str, Any] = {}
    for name, value in settings.items():
        if name in known:
            own[name] = None if name == "kv_cache_dtype" and value == "auto" else value
        elif name in WITHOUT_EFFECT:
            if value is not None:
                _logger.info("%s: %s=%r changes nothing here: %s", _NAME, name, value, WITHOUT_EFFECT[name])
        elif name in REJECTED:
            if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL):
                raise ValueError(f"{_NAME}: {name} must be left out, got {value!r}: {REJECTED[name]}")
        else:
            near = get_close_matches(name, [*known, *WITHOUT_EFFECT, *REJECTED], 1)
            hint = f" (the nearest is {near[0]})" if near else ""
            raise ValueError(f"{_NAME}: arguments must be LLM's or fields of EngineConfig, got {name}={value!r}{hint}")
    return EngineConfig(**own)
