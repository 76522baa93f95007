"""InferEngine with generate: a model folder, and continuations of prompts that are token ids.

generate computes all prompts together by torch_infini.LLM; forward is that of the low-level engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..engine import LLM, SamplingParams
from ..engine.sampler import resolve_seeds
from ..models.config import token_ids
from ..models.llama import checked_config
from .auto_config import AutoConfig
from .cache import UNLIMITED, CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig
from .convert import underlying
from .distributed import DistConfig
from .lib import _infinilm

BLOCK = 32  # tokens in a block, where a static cache's config stands for a paged one


@dataclass
class GenerationConfig:
    """How prompts are continued.

    Attributes:
        max_new_tokens: At most so many; None: as many as the cache and the model's positions hold.
        temperature: What logits are divided by; 0: the most likely token always.
        top_k: Draw among so many most likely tokens; 0: no limit; 1: the most likely token always.
        top_p: Draw among the most likely tokens that hold this share of the probability.
        eos_token_id: Tokens that end a continuation; None: the model's.
        stop_on_eos: Whether they do.
        seed: Of the random numbers; each row's follow from it. None: one is drawn.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    eos_token_id: int | Sequence[int] | None = None
    stop_on_eos: bool = True
    seed: int | None = None


class InferEngine(_infinilm.InferEngine):
    """The low-level engine with the config and the parameters of a model folder.

    Args:
        model_path: A Hugging Face folder on this machine. Without safetensors the parameters come by load_param.
        device: As device_type of the low-level engine.
        distributed_config: As there.
        cache_config: As there.

    Attributes:
        config: The folder's LlamaConfig.

    Raises:
        FileNotFoundError: For a config.json or file that is not there.
        ValueError: For a model that is not served, or a checkpoint that does not fit its config.
        What the low-level engine raises.
    """

    def __init__(
        self,
        model_path: str | Path,
        device: Any = None,
        distributed_config: DistConfig | None = None,
        cache_config: CacheConfig | None = None,
    ) -> None:
        self.config = AutoConfig.from_pretrained(model_path)
        has_files = any(Path(model_path).glob("*.safetensors"))
        if has_files:
            checked_config(model_path)
        super().__init__(self.config, distributed_config, device, cache_config)
        if has_files:
            self._rank.load_folder(model_path)

    def generate(self, input_ids: Any, generation_config: GenerationConfig | None = None) -> list[list[int]]:
        """Continue prompts.

        During the call it has a cache of its own, of the size of cache_config (without a limit, or None: of
        torch_infini.LLM's default size); forward's cache is not touched. Hooks are called in forward only.

        Args:
            input_ids: [rows, length], or what carries it as `_underlying`, or a list of token ids for each row, of any
                lengths.
            generation_config: For all rows; None: GenerationConfig().

        Returns:
            The new tokens of each row; one that ends it is the last of them.

        Raises:
            ValueError: For prompts or settings that cannot be served.
            RuntimeError: If parameters are missing, or a row fails.
        """
        self._rank.check_loaded(_NAME)
        found = underlying(input_ids)
        prompts = found.tolist() if isinstance(found, Tensor) else [list(row) for row in found]
        g = generation_config or GenerationConfig()
        common: dict[str, Any] = {
            "temperature": g.temperature,
            "top_k": g.top_k,
            "top_p": g.top_p,
            "max_tokens": g.max_new_tokens,
        }
        if g.eos_token_id is not None or not g.stop_on_eos:  # not the model's
            common |= {"ignore_eos": True, "stop_token_ids": token_ids(g.eos_token_id) if g.stop_on_eos else ()}
        seeds = resolve_seeds(SamplingParams(n=max(len(prompts), 1), seed=g.seed))
        params = [SamplingParams(**common, seed=seed) for seed in seeds[: len(prompts)]]
        llm = LLM(self._rank.model, **_cache_settings(self.get_cache_config(), self.config.max_position_embeddings))
        outputs = llm.generate(prompts, params)
        for row, output in enumerate(outputs):
            if output.completions[0].error is not None:
                raise RuntimeError(f"{_NAME}: row {row} failed: {output.completions[0].error}")
        return [output.tokens for output in outputs]


def _cache_settings(config: CacheConfig, positions: int) -> dict[str, Any]:
    if isinstance(config, PagedKVCacheConfig):
        blocks = config.num_blocks()
        size = {"cache_bytes": config.max_kv_memory_bytes()} if blocks is None else {"cache_blocks": blocks}
        return {**size, "block_size": config.block_size()}
    assert isinstance(config, StaticKVCacheConfig)
    rows, length = config.max_batch_size(), config.max_cache_len()
    if length in (0, UNLIMITED):
        return {}
    return {
        "max_sequences": rows,
        "max_length": min(length, positions),
        "cache_blocks": rows * -(-length // BLOCK),
        "block_size": BLOCK,
    }


_NAME = "torch_infini.infinilm.infer_engine.InferEngine.generate"
