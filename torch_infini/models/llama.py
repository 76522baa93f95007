"""Llama: llama, mistral, qwen2 and qwen3 models from the layers of torch_infini.nn, read from a Hugging Face folder.

A forward pass takes a Batch of tokens and a KVCache, and returns logits. Llama.forward is where to begin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import checkpoints
from .._core.dtypes import floating
from .._core.memory import allocate
from ..checkpoints import StoredLayer
from ..distributed import TPGroup
from ..nn import (
    Attention,
    Batch,
    DecoderLayer,
    DecoderLayers,
    Embedding,
    KVCache,
    Linear,
    LoRASite,
    MergedLinear,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
)
from ..nn.cache import token_bytes
from ..nn.linear import fastest, rows_of
from ..weights import FORMATS, Format, Integers, TensorSpec, best, in_panels
from . import cache, quantized
from .checkpoint import Shard, Slot, check_sizes, digest_of, load_checkpoint, stored_layers
from .config import LlamaConfig

# Tensors of older checkpoints that are not parameters: frequencies and masks that follow from the config.
_NOT_PARAMETERS = re.compile(r"\.rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")


_TABLE = "model.embed_tokens"  # the embedding's name in checkpoints
_TABLE_ROWS = 1024  # that are read at a time


class Llama(nn.Module):
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
        config, tp_group: As given.
        kv_heads: Key heads of a layer on this rank.
        dtype: Of activations.
        embed: Embedding.
        layers: DecoderLayers.
        norm: The last RMSNorm.
        head: Linear, from the last norm to logits. If tied and dense, or in blocks, it has the embedding's parameter.
        rotary_switch: How a batch says which of two rotations a token gets (longrope); None: there is one.
        kernels_only, is_recordable: True: a decode step calls only ops of torch.ops.infini, and may be recorded.

    Raises:
        ValueError: If the heads or the MLP's columns are not a multiple of the ranks.

    Source: Touvron et al., LLaMA, 2023, arXiv:2302.13971; Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053
        (tensor parallelism).
    """

    kernels_only = is_recordable = True

    def __init__(
        self,
        config: LlamaConfig,
        weights: str = "dense",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        tp_group: TPGroup | None = None,
    ) -> None:
        super().__init__()
        self.config, self.tp_group = config, tp_group
        self.dtype = dtype = floating(dtype) or config.dtype or torch.float32
        size, eps = config.hidden_size, config.rms_norm_eps
        rotary = RotaryEmbedding(**config.rope, dtype=dtype, device=device)
        self.rotary_switch = rotary.switch
        norm = partial(RMSNorm, size, eps, dtype, device, tp_group)
        one = tp_group or TPGroup(0, 1, 0)
        _, heads = one.shard("num_attention_heads", config.num_attention_heads)
        _, self.kv_heads = one.shard_or_replicate("num_key_value_heads", config.num_key_value_heads)
        _, inner = one.shard("intermediate_size", config.intermediate_size)

        def layer(window: int) -> DecoderLayer:
            attention = Attention(
                size,
                heads,
                self.kv_heads,
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

        self.embed = Embedding(config.vocab_size, size, dtype, device, tp_group)
        self.layers = DecoderLayers(layer(window) for window in config.windows)
        self.norm = norm()
        dense_head = "dense" if config.tie_word_embeddings else weights
        head_format = best("int8", device).name if weights in FORMATS else dense_head
        self.head = Linear(size, self.embed.weight.shape[0], False, head_format, dtype, device)
        if self.shares_embedding:
            self.head.weight = self.embed.weight
        if one.rank > 0:  # the all-reduce must add the bias once, so only rank 0 has it
            for layer in self.layers:
                for bias in (layer.attention.out.bias, layer.mlp.down.bias):
                    if bias is not None:
                        nn.init.zeros_(bias)
        self.eval()

    @property
    def shares_embedding(self) -> bool:
        """Whether the head reads the embedding's memory."""
        return self.config.tie_word_embeddings and (self.head.format == "dense" or self.embed.format != "dense")

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
        c = self.config
        sizes = c.num_hidden_layers, blocks, self.kv_heads, block_size, c.head_dim
        return KVCache(*sizes, self.dtype if dtype is None else dtype, self.embed.weight.device)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token's keys and values in a cache of that dtype."""
        return token_bytes(self.config.num_hidden_layers, self.kv_heads, self.config.head_dim, dtype)

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

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.embed.weight.device

    bytes_per_sequence = 0  # beside keys and values

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a step reads: all except the embedding, of which it reads one row per token."""
        table = self.embed.weight
        return sum(p.nbytes for p in self.parameters() if p is not table or self.shares_embedding)

    def slots(self, stored: Mapping[str, StoredLayer] | None = None) -> dict[str, Slot]:
        """Return the slots of a checkpoint's tensors, by Hugging Face names; in a group, of this rank's shards.

        Args:
            stored: The layers that the checkpoint stores as integers; the model's layers have the same format.
        """
        stored = stored or {}
        linear_slots = partial(_linear_slots, stored)
        c, table = self.config, self.embed
        vocabulary = _Shard(c.vocab_size, table.first, table.here)
        slots = {
            "model.embed_tokens.weight": _rows_slot(table.weight.data[: table.here], vocabulary),
            "model.norm.weight": _parameter_slot(self.norm.weight),
        }
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}."
            attention = layer.attention
            slots[at + "input_layernorm.weight"] = _parameter_slot(layer.attention_norm.weight)
            slots[at + "post_attention_layernorm.weight"] = _parameter_slot(layer.mlp_norm.weight)
            if attention.q_norm is not None and attention.k_norm is not None:
                slots[at + "self_attn.q_norm.weight"] = _parameter_slot(attention.q_norm.weight)
                slots[at + "self_attn.k_norm.weight"] = _parameter_slot(attention.k_norm.weight)
        *of_layers, head = self._products()
        for product in of_layers:
            slots |= linear_slots(product.prefix, product.linear, product.parts, product.columns)
        if not c.tie_word_embeddings or "lm_head" in stored:
            slots |= linear_slots(head.prefix, head.linear, head.parts, head.columns)
        elif not self.shares_embedding:
            slots["model.embed_tokens.weight"] = _with_copy(slots["model.embed_tokens.weight"], self.head.load)
        if table.format != "dense":
            del slots["model.embed_tokens.weight"]  # blocks are taken as they are
        return slots

    def _products(self) -> Iterator[_Projections]:
        """Yield the linear layers with the projections of each; the head last."""
        c, tp_group, table = self.config, self.tp_group or TPGroup(0, 1, 0), self.embed
        heads, inner = c.num_attention_heads, c.intermediate_size
        first_kv, kv_count = tp_group.shard_or_replicate("num_key_value_heads", c.num_key_value_heads)
        q = _Shard(heads, *tp_group.shard("num_attention_heads", heads)).times(c.head_dim)
        kv = _Shard(c.num_key_value_heads, first_kv, kv_count).times(c.head_dim)
        mlp = _Shard(inner, *tp_group.shard("intermediate_size", inner))
        whole = _Shard(c.hidden_size, 0, c.hidden_size)
        for i, layer in enumerate(self.layers):
            at = f"model.layers.{i}."
            attention, gated = layer.attention, layer.mlp
            yield _Projections(at + "self_attn.", attention, "qkv", {"q_proj": q, "k_proj": kv, "v_proj": kv}, whole)
            yield _Projections(at + "self_attn.", attention, "out", {"o_proj": whole}, q)
            yield _Projections(at + "mlp.", gated, "gate_up", {"gate_proj": mlp, "up_proj": mlp}, whole)
            yield _Projections(at + "mlp.", gated, "down", {"down_proj": whole}, mlp)
        vocabulary = _Shard(c.vocab_size, table.first, table.here)
        yield _Projections("", self, "head", {"lm_head": vocabulary}, whole)

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
            formats = _formats(config, stored, weights)
            kinds = {format for name, format in formats.items() if name != "lm_head"}
            # If all layers have one format, only the head is made twice.
            weights = kinds.pop() if len(kinds) == 1 and formats["lm_head"] != "dense" else "dense"
        format = weights if stored and weights != "dense" else fastest(weights, dtype, device)
        model = cls(config, format, dtype, device, tp_group)
        if stored:
            model._set_formats(stored, formats, dtype, device)
        load_checkpoint(folder, model.slots(stored), partial(_is_known, config, stored), progress)
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
            config = _checked(checkpoint)
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


def model_folder(name: str | Path) -> Path:
    """Return the folder or .gguf file of a model: the path given, or that of the name in the hub's cache."""
    path = Path(name)
    if not path.exists() and isinstance(name, str) and checkpoints.is_hub_name(name):
        return checkpoints.find(name)
    if not path.is_dir() and not (path.is_file() and path.suffix == ".gguf"):
        raise FileNotFoundError(f"torch_infini.models.Llama: the folder must exist, got {name}")
    return path


def _checked(checkpoint: checkpoints.Checkpoint) -> LlamaConfig:
    """Return the config of a checkpoint of another library, after checking its tensors against it."""
    config = quantized.config_of(checkpoint)
    checkpoints.check_layers("torch_infini.models.Llama", checkpoint.path, checkpoint.tensors, config.num_hidden_layers)
    quantized.check(checkpoint, config, shapes_of(config))
    return config


def checked_config(folder: str | Path) -> LlamaConfig:
    """Return a model folder's config, after checking the files' sizes against it; errors as Llama.from_pretrained."""
    if checkpoints.is_foreign(Path(folder)):
        with checkpoints.open_checkpoint(folder) as checkpoint:
            return _checked(checkpoint)
    config = LlamaConfig.from_pretrained(folder)
    stored = stored_layers(folder)
    integers = {f"{name}.weight_integers": kind for name, kind in stored.items()}

    def shapes() -> dict[str, tuple[int, ...]]:
        _formats(config, stored, "dense")  # describes errors in the names more clearly
        wanted = shapes_of(config)
        tied = {"lm_head.weight": (config.vocab_size, config.hidden_size)}  # a tied head may have integers of its own
        for name, kind in integers.items():
            dense = name.removesuffix("_integers")
            rows, columns = wanted.pop(dense, None) or tied[dense]
            wanted[name] = FORMATS[kind.format].kinds(rows, columns, kind.group, torch.float32)["weight"].shape
        return wanted

    def is_known(name: str) -> bool:
        beside = name.removesuffix("_scales").removesuffix("_zeros").removesuffix(".weight")
        return beside in stored or _is_known(config, stored, name)

    dtypes = {
        name: FORMATS[kind.format].kinds(1, kind.group or 1, kind.group, torch.float32)["weight"].dtype
        for name, kind in integers.items()
    }
    check_sizes(folder, config.num_hidden_layers, shapes, is_known, dtypes)
    return config


def _is_known(config: LlamaConfig, stored: Mapping[str, StoredLayer], name: str) -> bool:
    """Return whether a tensor without a slot may be in a checkpoint."""
    tied = config.tie_word_embeddings and name == "lm_head.weight"
    # Integers come with an empty weight, for readers that do not know them.
    empty = name.endswith(".weight") and name.removesuffix(".weight") in stored
    return tied or empty or _NOT_PARAMETERS.search(name) is not None


def shapes_of(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors by Hugging Face names, without a model."""
    c, size, inner = config, config.hidden_size, config.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    attention, mlp = "self_attn.", "mlp."
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (size,), "post_attention_layernorm.weight": (size,)}
    for name, rows, columns, bias in (
        (attention + "q_proj", q, size, c.qkv_bias),
        (attention + "k_proj", kv, size, c.qkv_bias),
        (attention + "v_proj", kv, size, c.qkv_bias),
        (attention + "o_proj", size, q, c.out_bias),
        (mlp + "gate_proj", inner, size, c.mlp_bias),
        (mlp + "up_proj", inner, size, c.mlp_bias),
        (mlp + "down_proj", size, inner, c.mlp_bias),
    ):
        layer[name + ".weight"] = (rows, columns)
        if bias:
            layer[name + ".bias"] = (rows,)
    if c.qk_norm:
        layer |= {attention + "q_norm.weight": (c.head_dim,), attention + "k_norm.weight": (c.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, size),
        "model.norm.weight": (size,),
    }
    for i in range(c.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes if c.tie_word_embeddings else shapes | {"lm_head.weight": (c.vocab_size, size)}


class _Shard(NamedTuple):
    """A rank's shard of the rows or columns of a tensor."""

    whole: int
    first: int
    number: int

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.number)

    def times(self, size: int) -> _Shard:
        """Return the shard in rows or columns, if each item has `size` of them."""
        return _Shard(self.whole * size, self.first * size, self.number * size)


class _Projections(NamedTuple):
    """A linear layer and the projections that it concatenates, with this rank's rows and columns of each."""

    prefix: str
    parent: nn.Module
    attribute: str
    parts: dict[str, _Shard]
    columns: _Shard

    @property
    def linear(self) -> Linear | MergedLinear:
        linear: Linear | MergedLinear = getattr(self.parent, self.attribute)
        return linear

    def projections(self) -> list[checkpoints.Projection]:
        columns = self.columns.span
        return [
            checkpoints.Projection(f"{self.prefix}{name}", shard.span, columns) for name, shard in self.parts.items()
        ]


def _rows_slot(data: Tensor, rows: _Shard) -> Slot:
    """Return the slot of a parameter that holds these rows of a tensor."""

    def load(some: Tensor, first: int) -> None:
        data[first : first + some.shape[0]].copy_(some)

    return Slot((rows.whole, *data.shape[1:]), data, load, lambda: data, Shard(rows.first, rows.number))


def _parameter_slot(parameter: nn.Parameter) -> Slot:
    size = parameter.shape[0]
    return _rows_slot(parameter.data, _Shard(size, 0, size))


def _with_copy(slot: Slot, load: Callable[[Tensor, int], None]) -> Slot:
    """Return a slot that also passes the tensor's rows to another `load`."""

    def load_both(rows: Tensor, first: int) -> None:
        slot.load(rows, first)
        load(rows, first)

    return slot._replace(place=None, load=load_both)


def _formats(config: LlamaConfig, stored: Mapping[str, StoredLayer], weights: str) -> dict[str, str]:
    """Return the format of each layer of a checkpoint with integers, or "dense", by the layer's name.

    Raises:
        ValueError: If another format is requested, or projections of one Linear are stored in different ones.
    """
    groups: list[tuple[str, ...]] = [("lm_head",)]
    for i in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        groups += [(f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"), (f"{attention}o_proj",)]
        groups += [(f"{mlp}gate_proj", f"{mlp}up_proj"), (f"{mlp}down_proj",)]
    formats: dict[str, str] = {}
    for names in groups:
        kinds = {stored.get(name, StoredLayer("dense", 0)) for name in names}
        if len(kinds) > 1:
            shown = ", ".join(f"{name} {stored[name].format if name in stored else 'dense'}" for name in names)
            raise ValueError(
                "torch_infini.models.Llama: projections of one input must be stored alike, because one product "
                f"computes them, got {shown}: give patch_model's `skip` all of them"
            )
        formats |= dict.fromkeys(names, kinds.pop().format)
    if unknown := sorted(stored.keys() - formats.keys()):
        raise ValueError(
            "torch_infini.models.Llama: quantization_config.quantized must name linear layers of the model, got "
            f"{', '.join(unknown[:5])}"
        )
    of_layers = {format for name, format in formats.items() if name != "lm_head"}
    kinds_of = {"dense": {"dense"}, **{name: {one.serves, one.exact or name} for name, one in FORMATS.items()}}
    wanted = {name for format in of_layers for name in kinds_of[format]}
    if weights not in ("dense", *wanted):
        raise ValueError(
            "torch_infini.models.Llama: weights must be left out for a checkpoint of integers, or be its format "
            f"({', '.join(sorted(wanted))}), got {weights!r}"
        )
    return formats


def _integer_slots(
    name: str, linear: Linear, first: int, shard: _Shard, columns: _Shard, stored: StoredLayer
) -> dict[str, Slot]:
    """Return the slots of a quantized projection, which is in the Linear's rows from `first` on."""
    if linear.format != stored.format:
        raise ValueError(
            f"torch_infini.models.Llama: the format of {name} must be the checkpoint's, {stored.format}, got "
            f"{linear.format}"
        )
    format = FORMATS[stored.format]
    kinds = format.kinds(shard.whole, columns.whole, stored.group, linear.dtype)

    def slot(data: Tensor, kind: TensorSpec) -> Slot:
        """Return one tensor's slot. Rows of other ranks in the same panel of the file are read and discarded."""
        begin = shard.first // kind.rows
        rows = -(-(shard.first + shard.number) // kind.rows) - begin

        def load(some: Tensor, row: int) -> None:
            there = (begin + row) * kind.rows  # in the whole projection
            low, high = max(there, shard.first), min(there + len(some) * kind.rows, shard.first + shard.number)
            format.put(some, low - there, data, first + low - shard.first, high - low)

        together = shard.first % kind.rows == first % kind.rows == shard.number % kind.rows == 0
        place = data[first // kind.rows :][:rows] if together else None
        part = Shard(begin, rows)
        if len(kind.shape) > 1:
            end = columns.first + columns.number
            if columns.first % kind.columns or (end % kind.columns and end < columns.whole):
                raise ValueError(
                    f"torch_infini.models.Llama: ranks must not cut the groups of {kind.columns} numbers of {name}, "
                    f"got {columns.number} columns of each: use another tensor_parallel_size"
                )
            part = Shard(begin, rows, columns.first // kind.columns, data.shape[1])
        read = partial(_rows_of_integers, format, kind, data, first, shard.number)
        return Slot(kind.shape, place, load, read, part, None if kind.dtype.is_floating_point else kind.dtype)

    tensors = linear.integers._asdict()
    suffixes = {"weight": "weight_integers", "scales": "weight_scales", "zeros": "weight_zeros"}
    return {f"{name}.{suffixes[field]}": slot(tensors[field].data, kind) for field, kind in kinds.items()}


def _rows_of_integers(format: Format, kind: TensorSpec, data: Tensor, first: int, rows: int) -> Tensor:
    """Return rows of a tensor of a quantized Linear, in the layout of checkpoints."""
    there = data.new_zeros(-(-rows // kind.rows), *data.shape[1:])
    format.put(data, first, there, 0, rows)
    return there


def _load_rows(linear: Linear | MergedLinear, first: int, some: Tensor, row: int) -> None:
    """Load rows of a projection that begins at row `first` of a Linear."""
    linear.load(some, first + row)


def _linear_slots(
    stored: Mapping[str, StoredLayer],
    prefix: str,
    linear: Linear | MergedLinear,
    parts: dict[str, _Shard],
    columns: _Shard,
) -> dict[str, Slot]:
    """Return the slots of the projections that a Linear concatenates, for these rows and columns of each."""
    slots: dict[str, Slot] = {}
    first = 0
    for name, shard in parts.items():
        rows = slice(first, first + shard.number)
        if f"{prefix}{name}" in stored:
            assert isinstance(linear, Linear)
            slots |= _integer_slots(f"{prefix}{name}", linear, first, shard, columns, stored[f"{prefix}{name}"])
        else:
            slots[f"{prefix}{name}.weight"] = Slot(
                (shard.whole, columns.whole),
                linear.weight.data[rows] if isinstance(linear, Linear) and linear.format == "dense" else None,
                partial(_load_rows, linear, first),
                partial(linear.dense, rows),
                Shard(shard.first, shard.number, columns.first, columns.number),
            )
        if linear.bias is not None:
            # If the columns are sharded, the all-reduce must add the bias once: only rank 0 has it.
            mine = shard if columns.first == 0 else shard._replace(number=0)
            slots[f"{prefix}{name}.bias"] = _rows_slot(linear.bias.data[first : first + mine.number], mine)
        first += shard.number
    return slots
