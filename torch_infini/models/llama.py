"""Llama: the Decoder of a config, llama, mistral, qwen2 or qwen3, read from a Hugging Face folder or a GGUF file.

A forward pass takes a Batch of tokens and a KVCache, and returns logits: Decoder.forward, in decoder.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from .. import checkpoints
from .._core.dtypes import floating
from .._core.memory import allocate
from ..checkpoints import StoredLayer
from ..distributed import TPGroup
from ..nn import Attention, DecoderLayer, Embedding, Linear, LoRASite, RMSNorm, RotaryEmbedding, SwiGLU
from ..nn.linear import fastest
from ..weights import FORMATS, Integers, best, in_panels
from . import cache, quantized
from .checkpoint import Slot, digest_of, load_checkpoint, stored_layers
from .config import LlamaConfig
from .decoder import Decoder
from .folder import checked_config, checked_foreign, formats_of, is_known_without_slot, model_folder
from .slots import Projections, Share, linear_slots, parameter_slot, rows_slot, with_copy

_TABLE = "model.embed_tokens"  # the embedding's name in checkpoints
_TABLE_ROWS = 1024  # that are read at a time


class Llama(Decoder):
    """A LLaMA-type decoder, with uninitialized weights; from_pretrained reads them.

    Args:
        config: The sizes and settings.
        weights: Format of the linear layers, as in torch_infini.nn.Linear. With integers the head is int8: its error
            goes into every logit, and it is a small part of most models. With "packed" a tied head is dense.
        dtype: Of activations and dense weights; None: the config's, or float32.
        device: Where the model is.
        tp_group: The group that shards the model; None: it is not sharded. Heads, the MLP's columns and the vocabulary
            are sharded; key heads are replicated if there are fewer of them than ranks.

    Attributes:
        head: Of a tied head that is dense, or in blocks, the weight is the embedding's. Others: as Decoder.

    Raises:
        ValueError: If the heads or the MLP's columns are not a multiple of the ranks.

    Source: Touvron et al., LLaMA, 2023, arXiv:2302.13971; Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053
        (tensor parallelism).
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: str = "dense",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        tp_group: TPGroup | None = None,
    ) -> None:
        dtype = floating(dtype) or config.dtype or torch.float32
        size, eps = config.hidden_size, config.rms_norm_eps
        rotary = RotaryEmbedding(**config.rope, dtype=dtype, device=device)
        norm = partial(RMSNorm, size, eps, dtype, device, tp_group)
        one = tp_group or TPGroup(0, 1, 0)
        _, heads = one.shard("num_attention_heads", config.num_attention_heads)
        _, kv_heads = one.shard_or_replicate("num_key_value_heads", config.num_key_value_heads)
        _, inner = one.shard("intermediate_size", config.intermediate_size)

        def layer(window: int) -> DecoderLayer:
            attention = Attention(
                size,
                heads,
                kv_heads,
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
            mlp = SwiGLU(size, inner, config.mlp_bias, weights, dtype, device)
            return DecoderLayer(norm(), attention, norm(), mlp)

        embed = Embedding(config.vocab_size, size, dtype, device, tp_group)
        dense_head = "dense" if config.tie_word_embeddings else weights
        head_format = best("int8", device).name if weights in FORMATS else dense_head
        head = Linear(size, embed.weight.shape[0], False, head_format, dtype, device)
        super().__init__(config, embed, map(layer, config.windows), norm(), head, tp_group)
        if one.rank > 0:  # the all-reduce must add the bias once, so only rank 0 has it
            for layer in self.layers:
                for bias in (layer.attention.out.bias, layer.mlp.down.bias):
                    if bias is not None:
                        nn.init.zeros_(bias)

    def lora_sites(self) -> dict[str, LoRASite]:
        """Return the projections that adapters may change, by Hugging Face names: all but the head."""
        sites = {}
        *of_layers, _ = self._products()
        for product in of_layers:
            first = 0
            for name, shard in product.parts.items():
                whole = shard.whole, product.columns.whole
                site = LoRASite(product.linear, first, (shard.span,), product.columns.span, whole)
                sites[product.prefix + name] = site
                first += shard.number
        return sites

    def slots(self, stored: Mapping[str, StoredLayer] | None = None) -> dict[str, Slot]:
        """Return the slots of a checkpoint's tensors, by Hugging Face names; in a group, of this rank's shards.

        Args:
            stored: The layers that the checkpoint stores as integers; the model's layers have the same format.
        """
        stored = stored or {}
        c, table = self.config, self.embed
        vocabulary = Share(c.vocab_size, table.first, table.here)
        slots = {
            "model.embed_tokens.weight": rows_slot(table.weight.data[: table.here], vocabulary),
            "model.norm.weight": parameter_slot(self.norm.weight),
        }
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}."
            attention = layer.attention
            slots[at + "input_layernorm.weight"] = parameter_slot(layer.attention_norm.weight)
            slots[at + "post_attention_layernorm.weight"] = parameter_slot(layer.mlp_norm.weight)
            if attention.q_norm is not None and attention.k_norm is not None:
                slots[at + "self_attn.q_norm.weight"] = parameter_slot(attention.q_norm.weight)
                slots[at + "self_attn.k_norm.weight"] = parameter_slot(attention.k_norm.weight)
        *of_layers, head = self._products()
        for product in of_layers:
            slots |= linear_slots(stored, product.prefix, product.linear, product.parts, product.columns)
        if not c.tie_word_embeddings or "lm_head" in stored:
            slots |= linear_slots(stored, head.prefix, head.linear, head.parts, head.columns)
        elif not self.shares_embedding:
            slots["model.embed_tokens.weight"] = with_copy(slots["model.embed_tokens.weight"], self.head.load)
        if table.format != "dense":
            del slots["model.embed_tokens.weight"]  # blocks are taken as they are
        return slots

    def _products(self) -> Iterator[Projections]:
        """Yield the linear layers with the projections of each; the head last."""
        c, tp_group, table = self.config, self.tp_group or TPGroup(0, 1, 0), self.embed
        heads, inner = c.num_attention_heads, c.intermediate_size
        first_kv, kv_count = tp_group.shard_or_replicate("num_key_value_heads", c.num_key_value_heads)
        q = Share(heads, *tp_group.shard("num_attention_heads", heads)).times(c.head_dim)
        kv = Share(c.num_key_value_heads, first_kv, kv_count).times(c.head_dim)
        mlp = Share(inner, *tp_group.shard("intermediate_size", inner))
        whole = Share(c.hidden_size, 0, c.hidden_size)
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}."
            attention, gated = layer.attention, layer.mlp
            yield Projections(at + "self_attn.", attention, "qkv", {"q_proj": q, "k_proj": kv, "v_proj": kv}, whole)
            yield Projections(at + "self_attn.", attention, "out", {"o_proj": whole}, q)
            yield Projections(at + "mlp.", gated, "gate_up", {"gate_proj": mlp, "up_proj": mlp}, whole)
            yield Projections(at + "mlp.", gated, "down", {"down_proj": whole}, mlp)
        vocabulary = Share(c.vocab_size, table.first, table.here)
        yield Projections("", self, "head", {"lm_head": vocabulary}, whole)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        weights: str = "dense",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        activations: checkpoints.Activations | None = None,
        progress: bool | None = None,
        tp_group: TPGroup | None = None,
    ) -> Llama:
        """Read a Hugging Face model folder: config.json, generation_config.json, safetensors; or a GGUF file.

        With integer weights every tensor is quantized as it is read: the model is never in memory in full precision.
        Integers of torch_infini.save_patched are used as stored, and so are those of other libraries
        (docs/checkpoints.md) that int8 and int4 represent without loss; others are dequantized. On the CPU the loaded
        model is kept in the folder INFINI_CACHE, if that is set, and mapped at the next start (docs/engine.md).

        Args:
            folder: A folder or .gguf file on this machine, or "owner/model" of the hub.
            weights: "dense", packed if that is faster (torch_infini.nn.Linear); "int8" or "int4". For a folder with
                integers "dense" means the stored format, and it is not converted to another.
            dtype: Of activations and dense weights; None: the checkpoint's.
            device: Where the model goes.
            activations: As torch_infini.load's.
            progress: Whether to show a bar on stderr; None: if stderr is a terminal.
            tp_group: The group that shards the model; all ranks call this, and each reads its shard of the files.

        Returns:
            The model, ready for inference.

        Raises:
            FileNotFoundError: For a folder, config or file that does not exist.
            ValueError: For a config that is not supported or that the group cannot shard, a checkpoint that does not
                fit it (all tensors are named), or checkpoints that differ between ranks.
        """
        folder = model_folder(folder)
        if tp_group is not None:
            tp_group.must_agree("the checkpoint", digest_of(folder))
        settings = {
            "class": f"{cls.__module__}.{cls.__qualname__}",
            "weights": weights,
            "dtype": str(dtype).removeprefix("torch."),
            "activations": activations,
            "shard": None if tp_group is None else (tp_group.rank, tp_group.size),
        }
        build = partial(cls._from_files, folder, weights, dtype, device, activations, progress, tp_group)
        return cache.load(folder, settings, device, build, lambda *of: cls(of[0], "dense", of[1], "meta", tp_group))

    @classmethod
    def _from_files(
        cls,
        folder: Path,
        weights: str,
        dtype: torch.dtype | str | None,
        device: torch.device | str,
        activations: checkpoints.Activations | None,
        progress: bool | None,
        tp_group: TPGroup | None,
    ) -> Llama:
        """Read a model folder or GGUF file; as from_pretrained."""
        if checkpoints.is_foreign(folder):
            return cls._from_foreign(folder, weights, dtype, device, activations, progress, tp_group)
        if activations is not None:
            raise ValueError(
                "torch_infini.models.Llama: activations must be left out for a checkpoint that no other library has "
                f"quantized, got {activations!r} for {folder}"
            )
        config = checked_config(folder)
        dtype = floating(dtype) or config.dtype or torch.float32
        stored = stored_layers(folder)
        if stored:
            formats = formats_of(config, stored, weights)
            kinds = {format for name, format in formats.items() if name != "lm_head"}
            # If all layers have one format, only the head is made twice.
            weights = kinds.pop() if len(kinds) == 1 and formats["lm_head"] != "dense" else "dense"
        format = weights if stored and weights != "dense" else fastest(weights, dtype, device)
        model = cls(config, format, dtype, device, tp_group)
        if stored:
            model._set_formats(stored, formats, dtype, device)
        load_checkpoint(folder, model.slots(stored), partial(is_known_without_slot, config, stored), progress)
        return model

    @classmethod
    def _from_foreign(
        cls,
        path: Path,
        weights: str,
        dtype: torch.dtype | str | None,
        device: torch.device | str,
        activations: checkpoints.Activations | None,
        progress: bool | None,
        tp_group: TPGroup | None,
    ) -> Llama:
        """Read a checkpoint that another library quantized, or a GGUF file; as from_pretrained."""
        if weights != "dense":
            raise ValueError(
                "torch_infini.models.Llama: weights must be left out for a checkpoint that is quantized or a GGUF "
                f"file, got {weights!r} for {path}"
            )
        with checkpoints.open_checkpoint(path, activations) as checkpoint:
            config = checked_foreign(checkpoint)
            dtype = floating(dtype) or config.dtype or torch.float32
            model = cls(config, "dense", dtype, device, tp_group)
            products = [quantized.Product(one.parent, one.attribute, one.projections()) for one in model._products()]
            model._load_table(checkpoint)
            quantized.load(model, checkpoint, products, fastest("dense", dtype, device), progress)
        return model

    def _load_table(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Take the embedding in the blocks of a GGUF file, which a tied head multiplies by, unless it must be dense."""
        layer = checkpoint.layers.get(_TABLE)
        target = checkpoints.Target.of(self.dtype, self.device, checkpoint.activations)
        if layer is None or not checkpoint.path.is_file() or self.tp_group is not None or not target.prefers_blocks:
            return
        memory, format, panels = None, "", False
        for first in range(0, layer.n, _TABLE_ROWS):  # whose pages of the file are dropped before the next are read
            rows = slice(first, min(first + _TABLE_ROWS, layer.n))
            some = checkpoint.weight(_TABLE, self.dtype, rows, slice(0, layer.k), self.device)
            if memory is None:  # the head's products decide
                laid_out, _ = in_panels(some.kind, Integers(some.weight), self.dtype)
                whole = layer.n % FORMATS[laid_out].panel == 0
                panels = self.config.tie_word_embeddings and laid_out != some.kind and whole
                format = laid_out if panels else some.kind
                shape = FORMATS[format].kinds(layer.n, layer.k, 0, self.dtype)["weight"].shape
                memory = allocate(*shape, dtype=torch.uint8, device=self.device)
            part = in_panels(some.kind, Integers(some.weight), self.dtype)[1] if panels else Integers(some.weight)
            FORMATS[format].put(part.weight, 0, memory, first, len(some.weight))
        checkpoint.release(_TABLE)
        if memory is None:
            return
        self.embed.use_blocks(format, nn.Parameter(memory, requires_grad=False))
        if self.config.tie_word_embeddings:
            self.head = Linear.from_integers(format, layer.k, Integers(memory), dtype=self.dtype)
            self.head.weight = self.embed.weight

    def _set_formats(
        self,
        stored: Mapping[str, StoredLayer],
        formats: Mapping[str, str],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Change each linear layer to the format in which the checkpoint stores it.

        Raises:
            ValueError: If sharding would cut int4's groups.
        """
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}."
            for parent, name, parts in (
                (layer.attention, "qkv", f"{at}self_attn.q_proj"),
                (layer.attention, "out", f"{at}self_attn.o_proj"),
                (layer.mlp, "gate_up", f"{at}mlp.gate_proj"),
                (layer.mlp, "down", f"{at}mlp.down_proj"),
            ):
                old = getattr(parent, name)
                wanted = formats[parts]
                if wanted not in ("dense", old.format):
                    sizes = old.in_features, old.out_features, old.bias is not None
                    setattr(parent, name, Linear(*sizes, wanted, dtype, device))
                if wanted != "dense" and (group := FORMATS[wanted].group(old.in_features)) != stored[parts].group:
                    raise ValueError(
                        f"torch_infini.models.Llama: groups of {wanted} must be those of the checkpoint, "
                        f"{stored[parts].group} in {parts}, got {group} for the "
                        f"{old.in_features} columns of each rank: use another tensor_parallel_size"
                    )
        if formats["lm_head"] not in ("dense", self.head.format):
            old = self.head
            self.head = Linear(old.in_features, old.out_features, False, formats["lm_head"], dtype, device)
