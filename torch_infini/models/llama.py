"""Llama: llama, mistral, qwen2 and qwen3 models from the layers of torch_infini.nn, read from a Hugging Face folder.

A forward pass takes a Batch of tokens and a KVCache, and gives logits. Read it from Llama.forward on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..nn import (
    Attention,
    Batch,
    DecoderLayer,
    Embedding,
    KVCache,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
    WeightFormat,
)
from .checkpoint import Slot, floating, load_checkpoint
from .config import LlamaConfig

# What older checkpoints hold beside the parameters: frequencies that follow from the config.
_NOT_PARAMETERS = re.compile(r"\.rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")


class Llama(nn.Module):
    """A decoder of LLaMA's kind, its weights not set: from_pretrained reads them.

    Args:
        config: The sizes and settings.
        weights: Format of the linear layers, as in torch_infini.nn.Linear. With "int4" the head is int8: its error goes
            into every logit, and it is a small part of most models.
        dtype: Of activations, and of dense weights; None: the config's, or float32.
        device: Where the model is.

    Attributes:
        config: As given.
        dtype: Of activations.
        embed: Embedding.
        layers: DecoderLayers.
        norm: The last RMSNorm.
        head: Linear, from the last norm to logits. Tied and dense it has the embedding's parameter.

    Source: Touvron et al., LLaMA, 2023, arXiv:2302.13971.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: WeightFormat = "dense",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype = floating(dtype) or config.dtype or torch.float32
        size, eps = config.hidden_size, config.rms_norm_eps
        rotary = RotaryEmbedding(**config.rope, dtype=dtype, device=device)
        norm = partial(RMSNorm, size, eps, dtype, device)

        def layer(window: int) -> DecoderLayer:
            attention = Attention(
                size,
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                rotary,
                bias=config.qkv_bias,
                out_bias=config.out_bias,
                qk_norm=eps if config.qk_norm else None,
                window=window,
                format=weights,
                dtype=dtype,
                device=device,
            )
            mlp = SwiGLU(size, config.intermediate_size, config.mlp_bias, weights, dtype, device)
            return DecoderLayer(norm(), attention, norm(), mlp)

        self.embed = Embedding(config.vocab_size, size, dtype, device)
        self.layers = nn.ModuleList(layer(window) for window in config.windows)
        self.norm = norm()
        self.head = Linear(size, config.vocab_size, False, "dense" if weights == "dense" else "int8", dtype, device)
        if self.shares_embedding:
            self.head.weight = self.embed.weight
        self.eval()

    @property
    def shares_embedding(self) -> bool:
        """Whether the head reads the embedding's memory."""
        return self.config.tie_word_embeddings and self.head.format == "dense"

    def forward(self, batch: Batch, cache: KVCache, rows: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Compute new tokens of one or more sequences.

        Args:
            batch: The tokens, and where they are.
            cache: Keys and values of the tokens before; those of the new ones are written.
            rows: [n] int64: of which tokens logits are wanted; None: of all.
            out: Where the logits go, contiguous; None: into a new tensor.

        Returns:
            Logits [n or tokens, vocab_size], dtype of the model.
        """
        x, residual = self.embed(batch.tokens), None
        for i, layer in enumerate(self.layers):
            x, residual = layer(x, residual, batch, cache.layer(i))
        x, _ = self.norm.after(x, residual)
        if rows is not None:
            x = torch.ops.infini.embedding.default(rows, x)  # x[rows]
        return self.head(x, out)

    def new_cache(self, blocks: int, block_size: int, dtype: torch.dtype | None = None) -> KVCache:
        """A cache for this model, on its device; in its dtype, or in int8."""
        c = self.config
        sizes = c.num_hidden_layers, blocks, c.num_key_value_heads, block_size, c.head_dim
        return KVCache(*sizes, self.dtype if dtype is None else dtype, self.embed.weight.device)

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a step reads: all but the embedding, of which it reads a row for each token."""
        table = self.embed.weight
        return sum(p.nbytes for p in self.parameters() if p is not table or self.shares_embedding)

    def slots(self) -> dict[str, Slot]:
        """Where the tensors of a checkpoint belong, by their Hugging Face names."""
        c = self.config
        q, kv, inner = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.intermediate_size
        slots = {"model.embed_tokens.weight": _whole(self.embed.weight), "model.norm.weight": _whole(self.norm.weight)}
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}."
            attention, mlp = layer.attention, layer.mlp
            slots[at + "input_layernorm.weight"] = _whole(layer.attention_norm.weight)
            slots[at + "post_attention_layernorm.weight"] = _whole(layer.mlp_norm.weight)
            slots |= _rows(at + "self_attn.", attention.qkv, {"q_proj": q, "k_proj": kv, "v_proj": kv})
            slots |= _rows(at + "self_attn.", attention.out, {"o_proj": c.hidden_size})
            if c.qk_norm:
                slots[at + "self_attn.q_norm.weight"] = _whole(attention.q_norm.weight)
                slots[at + "self_attn.k_norm.weight"] = _whole(attention.k_norm.weight)
            slots |= _rows(at + "mlp.", mlp.gate_up, {"gate_proj": inner, "up_proj": inner})
            slots |= _rows(at + "mlp.", mlp.down, {"down_proj": c.hidden_size})
        if not c.tie_word_embeddings:
            slots |= _rows("", self.head, {"lm_head": c.vocab_size})
        elif not self.shares_embedding:
            slots["model.embed_tokens.weight"] = _both(slots["model.embed_tokens.weight"], self.head.load)
        return slots

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        weights: WeightFormat = "dense",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        progress: bool | None = None,
    ) -> Llama:
        """Read a Hugging Face model folder: config.json, generation_config.json, safetensors.

        With integer weights every tensor is quantised as it is read: the model in full precision is never held.

        Args:
            folder: On this machine.
            weights: Format of the linear layers.
            dtype: Of activations and dense weights; None: the checkpoint's.
            device: Where the model goes.
            progress: Whether a line with GB/s goes to stderr; None: if that is a terminal.

        Returns:
            The model, ready for inference.

        Raises:
            FileNotFoundError: For a folder, config or file that is not there.
            ValueError: For a config that is not served, or a checkpoint that does not fit it; all tensors are named.
        """
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"torch_infini.models.Llama: the folder must exist, got {folder}")
        model = cls(LlamaConfig.from_pretrained(folder), weights, dtype, device)

        def is_known(name: str) -> bool:
            tied = model.config.tie_word_embeddings and name == "lm_head.weight"
            return tied or _NOT_PARAMETERS.search(name) is not None

        load_checkpoint(folder, model.slots(), is_known, progress)
        return model


def _whole(parameter: nn.Parameter) -> Slot:
    data = parameter.data

    def load(rows: Tensor, first: int) -> None:
        data[first : first + rows.shape[0]].copy_(rows)

    return Slot(tuple(data.shape), data, load, lambda: data)


def _both(slot: Slot, load: Callable[[Tensor, int], None]) -> Slot:
    """A tensor that two places take."""

    def load_both(rows: Tensor, first: int) -> None:
        slot.load(rows, first)
        load(rows, first)

    return slot._replace(place=None, load=load_both)


def _rows(prefix: str, linear: Linear, parts: dict[str, int]) -> dict[str, Slot]:
    """The projections that a Linear holds one below the other, with so many rows each."""
    slots, first = {}, 0
    for name, count in parts.items():
        rows = slice(first, first + count)
        place = linear.weight.data[rows] if linear.format == "dense" else None
        slots[f"{prefix}{name}.weight"] = Slot(
            (count, linear.in_features),
            place,
            lambda rows, row, first=first: linear.load(rows, first + row),
            partial(linear.dense, rows),
        )
        if linear.bias is not None:
            slots[f"{prefix}{name}.bias"] = _whole(nn.Parameter(linear.bias.data[rows], requires_grad=False))
        first += count
    return slots
