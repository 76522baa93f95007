"""Decoder: an embedding, layers, a last norm and a head over a paged cache: the model that the engine runs.

Llama (llama.py) makes these parts from a config. A part of your own, a norm say, costs its class and no file of ours.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..distributed import TPGroup
from ..nn import (
    Batch,
    DecoderLayer,
    DecoderLayers,
    Embedding,
    KVCache,
    Linear,
    LoRASite,
    RMSNorm,
    RotarySwitch,
)
from ..nn.cache import token_bytes
from ..nn.linear import rows_of
from .config import LlamaConfig

_OURS = __name__.split(".")[0] + "."


class Decoder(nn.Module):
    """A causal language model made of these parts: h = embed(tokens); h = layer(h) for each; logits = head(norm(h)).

    Args:
        config: Its sizes, the length of its sequences and their end tokens.
        embed: The embedding of the tokens, as torch_infini.nn.Embedding.
        layers: As torch_infini.nn.DecoderLayer, each with the parts attention_norm, attention, mlp_norm and mlp.
        norm: The last norm, as torch_infini.nn.RMSNorm: norm(x), and norm.after(x, residual), which is
            (norm(residual + x), residual + x).
        head: From the last norm to logits, as torch_infini.nn.Linear. If config.tie_word_embeddings, and it is dense,
            it has the embedding's weight.
        tp_group: The group that shards the model, whose parts are this rank's; None: it is not sharded.

    A part may be any module that is called as the one named here. Of modules that are not torch_infini's, ops of any
    library are recorded with a decode step; if an op cannot be, steps are computed op by op.

    Attributes:
        config, embed, layers, norm, head, tp_group: As given.
        kv_heads, head_dim: Key heads of a layer on this rank, and their columns.
        is_recordable: Whether a decode step may be recorded; the engine sets it to False after one could not be.

    Raises:
        ValueError: If there are no layers, or not as many as config says; for a layer or a norm without what is named
            here.

    Example:
        >>> model = torch_infini.models.Llama.from_pretrained(folder)
        >>> for layer in model.layers:
        ...     layer.mlp_norm = MyNorm(layer.mlp_norm.weight)
        >>> torch_infini.LLM(model, tokenizer=folder).generate("Once upon a time")
    """

    is_recordable = True
    bytes_per_sequence = 0  # beside keys and values

    def __init__(
        self,
        config: LlamaConfig,
        embed: Embedding,
        layers: Iterable[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
        tp_group: TPGroup | None = None,
    ) -> None:
        super().__init__()
        self.config, self.tp_group = config, tp_group
        self.embed, self.layers, self.norm, self.head = embed, DecoderLayers(layers), norm, head
        if not 0 < len(self.layers) == config.num_hidden_layers:
            raise ValueError(
                f"torch_infini.models.Decoder: layers must be num_hidden_layers of the config, at least 1, "
                f"{config.num_hidden_layers}, got {len(self.layers)}"
            )
        for i, layer in enumerate(self.layers):
            if missing := [
                part for part in ("attention_norm", "attention", "mlp_norm", "mlp") if not hasattr(layer, part)
            ]:
                raise ValueError(
                    f"torch_infini.models.Decoder: layers must have attention_norm, attention, mlp_norm and mlp, got "
                    f"{type(layer).__name__} without {', '.join(missing)} (layer {i})"
                )
        norms = [norm, *(part for layer in self.layers for part in (layer.attention_norm, layer.mlp_norm))]
        other = next((one for one in norms if not callable(getattr(one, "after", None))), None)
        if other is not None:
            raise ValueError(
                "torch_infini.models.Decoder: a norm must have after(x, residual), which returns (norm(residual + x), "
                f"residual + x), got {type(other).__name__} without it"
            )
        attention = next(iter(self.layers)).attention
        self.kv_heads, self.head_dim = attention.kv_heads, attention.head_dim
        if self.shares_embedding:
            head.weight = embed.weight
        self.eval()

    def forward(
        self,
        batch: Batch,
        cache: KVCache,
        last: bool = False,
        out: Tensor | None = None,
        whole: bool = False,
    ) -> Tensor:
        """Compute the logits of new tokens of one or more sequences.

        Args:
            batch: The tokens, their positions and their cache slots.
            cache: Keys and values of earlier tokens; those of the new tokens are written.
            last: Compute logits only for the last new token of each of the batch's n wanted sequences; for other tokens
                the last layer then computes only keys and values.
            out: Contiguous memory for the logits; None: a new tensor.
            whole: With `last`, still compute the last layer for all tokens, for callers that inspect the submodules.
                The last bits of the logits may differ.

        Returns:
            Logits [tokens, vocab_size], or [n, vocab_size] if `last`, in the model's dtype.
        """
        early = last and not whole
        x = self.hidden_states(batch, cache, early)
        if last and not early:
            x = rows_of(x, batch.ends)
        if self.tp_group is None:
            return self.head(x, out)
        return self.tp_group.all_gather(self.head(x), self.config.vocab_size, out)

    def hidden_states(self, batch: Batch, cache: KVCache, last: bool = False) -> Tensor:
        """Compute the states of new tokens after the last norm.

        Args:
            batch, cache, last: As of forward.

        Returns:
            States [tokens, hidden_size], or [n, hidden_size] if `last`, in the model's dtype.
        """
        x: Tensor = self.embed(batch.tokens)
        residual: Tensor | None = None
        for i, layer in enumerate(self.layers):
            x, residual = layer(x, residual, batch, cache.layer(i), last and i + 1 == len(self.layers))
        assert residual is not None
        x, _ = self.norm.after(x, residual)
        return x

    def new_cache(self, blocks: int, block_size: int, dtype: torch.dtype | None = None, sequences: int = 1) -> KVCache:
        """Make a cache for this model, on its device; dtype None: the model's. It keeps no other states."""
        sizes = len(self.layers), blocks, self.kv_heads, block_size, self.head_dim
        return KVCache(*sizes, self.dtype if dtype is None else dtype, self.device)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token's keys and values in a cache of that dtype."""
        return token_bytes(len(self.layers), self.kv_heads, self.head_dim, dtype)

    def lora_sites(self) -> dict[str, LoRASite]:
        """Return the projections that adapters may change, by the names that adapters have for them: none."""
        return {}

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and logits."""
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.embed.weight.device

    @property
    def kernels_only(self) -> bool:
        """Whether a decode step calls only ops of torch.ops.infini: if no part is of another package's class."""
        return all(type(module).__module__.startswith(_OURS) for module in self.modules())

    @property
    def rotary_switch(self) -> RotarySwitch | None:
        """How a batch says which of two rotations a token gets (longrope); None: there is one."""
        rotary = getattr(next(iter(self.layers)).attention, "rotary", None)
        return None if rotary is None else rotary.switch

    @property
    def shares_embedding(self) -> bool:
        """Whether the head reads the embedding's memory."""
        return self.config.tie_word_embeddings and (self.head.format == "dense" or self.embed.format != "dense")

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a step reads: all except the embedding, of which it reads one row per token."""
        table = self.embed.weight
        return sum(p.nbytes for p in self.parameters() if p is not table or self.shares_embedding)
