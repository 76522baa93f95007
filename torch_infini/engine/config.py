"""EngineConfig: the limits of an engine, checked when they are set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from .sampling_params import is_integer
from .speculation import MAX_ROWS, SpeculativeConfig

KVCacheDtype = Literal["int8"]
CACHE_BYTES = 2 << 30  # upper limit of the default cache size


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine: how many requests it serves at a time, in how much memory.

    Attributes:
        max_num_seqs: The most sequences in a step.
        max_model_len: The most tokens of a sequence, prompt included; None: the model's positions.
        cache_bytes: Bytes for keys and values; None: enough for max_num_seqs of max_model_len, at most 2 GiB.
        cache_blocks: The cache's size in blocks; cache_bytes must then be None.
        block_size: Tokens in a block of the cache.
        kv_cache_dtype: "int8": keys and values are kept as int8 with a float32 scale for each token and head: 0.52 of
            the memory of bfloat16 for heads of 128 columns; docs/engine.md has its speed and accuracy. None: in the
            model's dtype.
        max_num_batched_tokens: A step that has this many prompt tokens takes no further chunk of a prompt: sequences
            that generate wait while a step takes longer.
        chunk_size: Prompts are cut at multiples of this many tokens. None: 64, or 128 for a model with as many key
            heads as query heads, whose attention would take 1.1 times as long in smaller chunks; 256 for a model that
            keeps other states, of which a step takes one chunk of each prompt.
        enable_prefix_caching: Whether a prompt may begin with blocks that others filled with the same tokens, up to a
            multiple of chunk_size.
        reuse_generated: Whether such blocks may also hold generated tokens, as in a conversation's next turn. Generated
            tokens are computed one by one and prompts in chunks, so the last bits of logits may then differ from those
            of the same request without reuse.
        enforce_eager: Whether decode steps run op by op, instead of being recorded and replayed
            (torch_infini.runtime.program, on CUDA graph).
        enable_lora: Whether requests may have a LoRA adapter (LoRARequest).
        max_loras: The most adapters of unfinished requests; as many stay in memory.
        max_lora_rank: The largest rank of an adapter; smaller ones take as much memory and time.
        speculative_config: How next tokens are guessed, so that a step may give several; a SpeculativeConfig, or a
            mapping of its fields. The tokens are those without. None: a step gives one token of each sequence.
        limit_mm_per_prompt: {"image": the most images of a prompt}; None: any number.
    """

    max_num_seqs: int = 32
    max_model_len: int | None = None
    cache_bytes: int | None = None
    cache_blocks: int | None = None
    block_size: int = 32
    kv_cache_dtype: KVCacheDtype | None = None
    max_num_batched_tokens: int = 512
    chunk_size: int | None = None
    enable_prefix_caching: bool = True
    reuse_generated: bool = True
    enforce_eager: bool = False
    enable_lora: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    speculative_config: SpeculativeConfig | None = None
    limit_mm_per_prompt: Mapping[str, int] | None = None

    @property
    def max_images(self) -> int | None:
        """The most images of a prompt; None: any number."""
        return None if self.limit_mm_per_prompt is None else self.limit_mm_per_prompt.get("image")

    @property
    def max_rows(self) -> int:
        """The most rows of a decode step: with guesses it has several of a sequence."""
        return self.max_num_seqs if self.speculative_config is None else max(self.max_num_seqs, MAX_ROWS)

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(self.speculative_config))
        for name in (
            "max_num_seqs",
            "max_model_len",
            "cache_bytes",
            "cache_blocks",
            "block_size",
            "max_num_batched_tokens",
            "chunk_size",
            "max_loras",
            "max_lora_rank",
        ):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "cache_bytes", "cache_blocks", "chunk_size"):
                continue
            if not is_integer(value) or value < 1:
                raise ValueError(f"torch_infini.EngineConfig: {name} must be an integer of at least 1, got {value!r}")
            if value >= 2**63:
                raise ValueError(f"torch_infini.EngineConfig: {name} must be at most {2**63 - 1}, got {value!r}")
        for name in ("enable_prefix_caching", "reuse_generated", "enforce_eager", "enable_lora"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(
                    f"torch_infini.EngineConfig: {name} must be True or False, got {getattr(self, name)!r}"
                )
        if self.kv_cache_dtype not in (None, *get_args(KVCacheDtype)):
            raise ValueError(
                f'torch_infini.EngineConfig: kv_cache_dtype must be "int8" or None (the model\'s), got '
                f"{self.kv_cache_dtype!r}"
            )
        limits = self.limit_mm_per_prompt
        if limits is not None and (
            not isinstance(limits, Mapping)
            or set(limits) - {"image"}
            or not all(is_integer(value) and value >= 0 for value in limits.values())
        ):
            raise ValueError(
                f'torch_infini.EngineConfig: limit_mm_per_prompt must be {{"image": at least 0}} or None, '
                f"got {limits!r}"
            )
        if self.cache_bytes is not None and self.cache_blocks is not None:
            raise ValueError(
                "torch_infini.EngineConfig: cache_blocks must be None where cache_bytes is given, got both"
            )
