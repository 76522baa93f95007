"""Part attention: a backend over vLLM's paged cache, which is read where it lies.

vLLM's CPU build gives each block of each head the rows of its keys, then those of its values; what lies in them is the
backend's own affair. Its own kernels take them in an order of their own, ours row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..._core.library import cpu_capability
from .activation import Activation

NAME = "INFINI"
# What to do about a step that no layer announces when backends are chosen.
INSTEAD = "; vLLM's own serves this: --attention-backend CPU_ATTN, or TORCH_INFINI_VLLM=ops,linear"
# What a layer may ask for besides, by the names of vLLM's AttentionSelectorConfig.
ASKED = (
    "use_mla",
    "use_sparse",
    "use_mm_prefix",
    "use_per_head_quant_scales",
    "use_non_causal",
    "use_kv_connector",
    "use_pcp",
    "use_dcp",
    "use_rswa",
)


def caches_of(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and the values [blocks, Hkv, block, D], views, of a cache [blocks, Hkv, block, 2 * D]."""
    blocks, heads, block, width = kv_cache.shape
    rows = kv_cache.view(blocks, heads, 2 * block, width // 2)
    return rows[:, :, :block], rows[:, :, block:]


class InfiniAttention(CPUAttentionBackendImpl):  # type: ignore[misc]  # vLLM is untyped here
    """Causal attention of a decoder's layer."""

    sinks: Any  # [H], or None
    _cache: Tensor | None = None  # of the last call, and its two views: a step's host time is a part of its time
    _views: tuple[Tensor, Tensor]

    def views_of(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return caches_of(kv_cache), made once for a cache."""
        if self._cache is not kv_cache:
            self._cache, self._views = kv_cache, caches_of(kv_cache)
        return self._views

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write key and value [tokens, Hkv, D] into the cache, and the attention of query [tokens, H, D] to output."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"torch_infini: attention must not quantize its result{INSTEAD}")
        if attn_metadata is None:  # vLLM measures memory
            return output
        tokens, lengths = attn_metadata.num_actual_tokens, attn_metadata.seq_lens
        if not attn_metadata.causal or attn_metadata.dynamic_causal is not None:
            raise NotImplementedError(f"torch_infini: attention must be causal{INSTEAD}")
        if self.sinks is not None and self.sinks.dtype != query.dtype:
            self.sinks = self.sinks.to(query.dtype)
        views, q, out = self.views_of(kv_cache), query, output.view(-1, self.num_heads, self.head_size)
        if len(q) != tokens:  # rows that fill up a compiled size
            q, out = q[:tokens], out[:tokens]
        if self.kv_sharing_target_layer_name is None and key is not None:  # else another layer has written
            slots = attn_metadata.slot_mapping
            if not len(slots) == len(key) == tokens:
                slots, key, value = slots[:tokens], key[:tokens], value[:tokens]
            torch.ops.infini.paged_caching.default(*views, key, value, slots)
        paged = (q, *views, attn_metadata.block_table, lengths)
        window = max(self.sliding_window, 0)
        options = (self.alibi_slopes, self.scale, window, None, None, float(self.logits_soft_cap), self.sinks)
        if attn_metadata.max_query_len == 1 and len(lengths) == tokens:
            torch.ops.infini.paged_attention.out(*paged, *options, out=out)
        else:
            torch.ops.infini.paged_attention_prefill.out(*paged, attn_metadata.query_start_loc, *options, out=out)
        return output


class InfiniAttentionMetadataBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """What a step's layers share, without the plan of vLLM's kernel."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return the metadata of a step."""
        of, is_causal = common_attn_metadata, common_attn_metadata.causal
        return CPUAttentionMetadata(
            num_actual_tokens=of.num_actual_tokens,
            max_query_len=of.max_query_len,
            query_start_loc=of.query_start_loc,
            max_seq_len=of.max_seq_len,
            seq_lens=of.seq_lens,
            block_table=of.block_table_tensor,
            slot_mapping=of.slot_mapping,
            scheduler_metadata=None,
            causal=is_causal is True,
            dynamic_causal=is_causal if isinstance(is_causal, Tensor) else None,
        )


class InfiniAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's backend for the CPU with kernels of torch_infini."""

    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @staticmethod
    def get_impl_cls() -> type[InfiniAttention]:
        return InfiniAttention

    @staticmethod
    def get_builder_cls() -> type[InfiniAttentionMetadataBuilder]:
        return InfiniAttentionMetadataBuilder


def refusal(asked: Any) -> str | None:
    """Return why a layer of vLLM's AttentionSelectorConfig is left to vLLM; None if the backend serves it."""
    if cpu_capability() == "avx512_amx":
        return "its own attention in AMX tiles is used, which was not compared with torch_infini's"
    if asked.attn_type != AttentionType.DECODER:
        return f"attention must be a decoder's, got {asked.attn_type}"
    if asked.kv_cache_dtype not in (None, "auto", "bfloat16", "float16"):
        return f"the cache must have the dtype of the model, got {asked.kv_cache_dtype}"
    if asked.head_size > 1024:
        return f"heads must have at most 1024 columns, got {asked.head_size}"
    return next((f"it asks for {name}" for name in ASKED if getattr(asked, name)), None)


def install(activation: Activation) -> None:
    """Register the backend, and make it the choice where none is named."""
    register_backend(NAME, f"{__name__}.{InfiniAttentionBackend.__name__}")
    ours: Any = AttentionBackendEnum[NAME]
    platform: Any = type(current_platform)
    original = platform.get_attn_backend_cls

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if selected_backend in (None, ours):
            if (reason := refusal(attn_selector_config)) is None:
                return str(ours.get_path())
            activation.leave("attention", reason)
            selected_backend = None
        return str(original(selected_backend, attn_selector_config, num_heads))

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    activation.replaced.append("attention")
