"""PagedModel: a causal language model of transformers with the engine's interface: it takes a batch and a paged cache.

Its own forward runs, patched or not; only attention is computed elsewhere (calls.py). A trial finds and rejects models
that keep more than keys and values from one token to the next, or that see other tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...distributed import TPGroup
from ...nn import Batch, EmbeddedPrompt, KVCache, LoRASite, MixedKVCache
from ...nn.cache import token_bytes
from ...nn.states import SequenceStates, StateShape
from ..checks.trial import rms, without_side_effects
from ..layers import interface
from ..layers.block_embedding import BlockEmbedding
from ..layers.memory import use_large_pages
from ..layers.packed_linear import bytes_of
from ..layers.paged import PAGED_NAME
from ..layers.state_space import reads_weight
from ..ranks.cut import Part, Range, part_of
from .calls import PagedBackend
from .causal_model import NAME, check_model, find_causal_model
from .config import config_of, positions_of
from .images import PromptEmbedder
from .rotation import find_switch, place_by_row, position_modules, rotary_modules, rotate_by_row
from .sites import Unserved, configs_of, find_sites, implementation
from .trial import compare, rounding_of, trial_tokens

_STATE_TOKENS = 256  # between two states of a sequence that are kept: the engine's chunk
CHECK = "warn_if_padding_and_no_attention_mask"  # a method of transformers' models
_logger = logging.getLogger("torch_infini")


class PagedModel:
    """A model of transformers, called as torch_infini.models.Llama is.

    Args:
        model: A causal language model, patched or not; on one device, in evaluation mode from now on.
        tp_group: The ranks that share it, if it is a part of one (split.py); each makes its PagedModel.

    Attributes:
        model, tp_group: As given.
        config: Its PagedConfig.
        dtype: The dtype of keys, values and returned logits.
        device: The model's device.
        kernels_only: False, because a step also runs ops of torch.
        is_recordable: Whether a decode step may be recorded; False after one could not be.
        rotary_switch: The length at which it changes its rotation (longrope), or None.
        without_images: Why prompts can have no images; "": they can.

    Raises:
        ValueError: For a model whose attention or state the cache does not hold, with the reason.
    """

    kernels_only = False

    def __init__(self, model: nn.Module, tp_group: TPGroup | None = None) -> None:
        self.model, self.tp_group = model, tp_group
        inner, self.device = check_model(model)
        model.eval()
        use_large_pages(model)
        interface.register()
        self._configs = configs_of(model)
        self._models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        self._keeps = "logits_to_keep" in inspect.signature(inner.forward).parameters
        positions = positions_of(inner)
        tokens = trial_tokens(inner).to(self.device)
        try:
            self.rotary_switch = find_switch(inner, positions)
            with without_side_effects(model):
                self._sites, logits = find_sites(model, tokens[None], positions)
                sites = list(self._sites.attention.values())
                self.dtype = sites[0].dtype if sites else logits.dtype
                if (rule := min((site.window.positions for site in sites), default=positions)) < positions:
                    _logger.warning(
                        "%s: sequences must be shorter than %d tokens, because from there on a query sees other keys "
                        "than the newest",
                        NAME,
                        rule,
                    )
                    positions = rule
                self.config = config_of(inner, logits, positions, sites[0].kv_heads if sites else 1)
                self._embedder, self.without_images = self._find_embedder()
                self.is_recordable = True
                self._first = 0
                placing = self._place_by_row()
                try:
                    self._try(tokens, logits)
                finally:
                    for handle in placing:
                        handle.remove()
        except Unserved as unserved:
            raise ValueError(f"{NAME}: {type(inner).__name__} cannot be served: {unserved}") from unserved
        for handle in self._place_by_row():
            finalize(self, handle.remove)
        if self.rotary_switch is not None:
            for module in rotary_modules(model):
                finalize(self, module.register_forward_hook(rotate_by_row, with_kwargs=True).remove)

    def __call__(
        self, batch: Batch, cache: KVCache | MixedKVCache, last: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Compute new tokens of one or more sequences; arguments and result as Llama.forward's."""
        ends = batch.ends if last else None
        more: dict[str, Any] = {"logits_to_keep": ends} if self._keeps and ends is not None else {}
        backend = PagedBackend(self._sites, batch, cache, self.rotary_switch)
        tokens, positions = batch.tokens[None], backend.positions[None] + self._first
        # With inference tensors a layer would not hand its norm to the next (layers/norm.py).
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            implementation(self._configs, PAGED_NAME, backend),
            without_checks(self._models),
            nullcontext() if self._embedder is None else self._embedder.replacing(batch.embedded),
        ):
            logits: Tensor = self.model(input_ids=tokens, position_ids=positions, use_cache=False, **more).logits[0]
        if ends is not None and not self._keeps:
            logits = logits[ends]
        return logits.to(self.dtype) if out is None else out.copy_(logits)

    def hidden_states(self, batch: Batch, cache: KVCache | MixedKVCache) -> Tensor:
        """Compute the states of new tokens after the last norm, transformers' last_hidden_state; as Llama's.

        Raises:
            ValueError: If the model has no part that computes them alone.
        """
        base = base_of(self.model)
        backend = PagedBackend(self._sites, batch, cache, self.rotary_switch)
        tokens, positions = batch.tokens[None], backend.positions[None] + self._first
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            implementation(self._configs, PAGED_NAME, backend),
            nullcontext() if self._embedder is None else self._embedder.replacing(batch.embedded),
        ):
            found = base(input_ids=tokens, position_ids=positions, use_cache=False)
        states: Tensor = found.last_hidden_state[0]
        return states

    @property
    def embeds_on_all_ranks(self) -> bool:
        """Whether ranks share what encodes images, so that all of them must call embed at the same time."""
        return self._embedder is not None and self._embedder.needs_all_ranks

    def embed(self, tokens: Sequence[int], inputs: Mapping[str, Tensor]) -> EmbeddedPrompt:
        """Encode the images of a prompt.

        Args:
            tokens: The prompt's, with those that stand for images.
            inputs: What the model's processor made of the images: further arguments of its forward.

        Raises:
            ValueError: If the model does not take them, or the engine cannot compute what it makes of them.
        """
        if self._embedder is None:
            raise ValueError(f"{NAME}: the prompt must have no images for this model ({self.without_images}), got some")
        there = {
            name: value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)
            for name, value in inputs.items()
        }
        with torch.inference_mode(False), torch.no_grad():
            try:
                return self._embedder.embed(torch.tensor(tokens, device=self.device), there)
            except Unserved as unserved:
                name = type(find_causal_model(self.model)).__name__
                raise ValueError(f"{NAME}: {name} must be served without images, got some: {unserved}") from unserved

    def _find_embedder(self) -> tuple[PromptEmbedder | None, str]:
        """Return what embeds prompts with images, or None and the reason."""
        inner = find_causal_model(self.model)
        if "pixel_values" not in inspect.signature(inner.forward).parameters:
            return None, f"{type(inner).__name__} reads text alone"
        if self.rotary_switch is not None:
            return None, "its rotation depends on a sequence's length"
        windows = [site.window.size for site in self._sites.attention.values()]
        try:
            return PromptEmbedder(self.model, [*self._sites.attention, *self._sites.states], windows), ""
        except Unserved as unserved:
            return None, str(unserved)

    def new_cache(
        self, blocks: int, block_size: int, dtype: torch.dtype | None = None, sequences: int = 1
    ) -> KVCache | MixedKVCache:
        """Make a cache for this model, on its device; dtype None: the model's. `sequences`: rows of its states."""
        layers = self._cache_layers
        dtype = self.dtype if dtype is None else dtype
        cache: KVCache | MixedKVCache
        if len(set(layers)) > 1:
            cache = MixedKVCache(layers, blocks, block_size, dtype, self.device)
        else:
            kv_heads, head_dim = layers[0]
            cache = KVCache(len(layers), blocks, kv_heads, block_size, head_dim, dtype, self.device)
        if self._sites.states:
            cache.states = SequenceStates(self._state_shapes, sequences, self.device)
        return cache

    @property
    def _cache_layers(self) -> list[tuple[int, int]]:
        """(kv_heads, head_dim) of each layer of the cache.

        A model without attention has one layer, to which nothing is written, so that its memory is not taken: blocks
        count the tokens of its prefixes. A token's share of it is that of a state that is kept after every chunk.
        """
        layers = [(site.kv_heads, site.head_dim) for site in self._sites.attention.values() if site.writes]
        return layers or [(1, max(self.bytes_per_sequence // (2 * _STATE_TOKENS * self.dtype.itemsize), 1))]

    @property
    def _state_shapes(self) -> list[StateShape]:
        return [shape for shapes in self._sites.states.values() for shape in shapes]

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of a sequence's states beside its keys and values; 0: the model keeps none."""
        return sum(shape.nbytes for shape in self._state_shapes)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token's keys and values in a cache of that dtype."""
        return sum(token_bytes(1, kv_heads, head_dim, dtype) for kv_heads, head_dim in self._cache_layers)

    def lora_sites(self) -> dict[str, LoRASite]:
        """Return the linear layers that adapters may change, by their names: all that are called but the head."""
        inner = find_causal_model(self.model)
        head = inner.get_output_embeddings()
        sites = {}
        for name, module in inner.named_modules():
            around, _, own = name.rpartition(".")
            called = not reads_weight(inner.get_submodule(around), own)
            if isinstance(module, nn.Linear) and module is not head and called:
                n, k = module.out_features, module.in_features
                rows, columns, shape = part_of(module) or Part((Range(0, n),), Range(0, k), (n, k))
                sites[name] = LoRASite(module, 0, tuple(one.span for one in rows), columns.span, shape)
        return sites

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a step reads: all but the embedding, of which it reads one row per token.

        All experts of a mixture are counted.
        """
        return step_bytes(self.model)

    def _place_by_row(self) -> list[Any]:
        """Let embeddings of positions that count from a cache read the batch's; return the hooks' handles."""
        modules = position_modules(self.model)
        return [module.register_forward_pre_hook(place_by_row, with_kwargs=True) for module in modules]

    def _try(self, tokens: Tensor, logits: Tensor) -> None:
        """Compute the trial's tokens in parts, beside another sequence, and compare with one ordinary call.

        Where they differ, try again with other positions of the first token, if one of these gives the ordinary call's
        logits.

        Raises:
            Unserved: If the logits differ.
        """
        try:
            return compare(self, tokens, logits)
        except Unserved as reason:
            self._first = self._find_first(tokens, logits)
            if not self._first:
                raise
            places = self.config.max_position_embeddings - self._first
            self.config = replace(self.config, max_position_embeddings=places)
            _logger.debug("%s: positions begin at %d (%s)", NAME, self._first, reason)
        compare(self, tokens, logits)

    def _find_first(self, tokens: Tensor, logits: Tensor) -> int:
        """Return the first token's position in an ordinary call: behind that of padding, as RoBERTa's; 0 if unknown."""
        embeddings = [module for module in self.model.modules() if isinstance(module, nn.Embedding)]
        count = torch.arange(len(tokens), device=tokens.device)
        for first in sorted({module.padding_idx + 1 for module in embeddings if module.padding_idx is not None}):
            try:
                with torch.no_grad():
                    found = self.model(input_ids=tokens[None], position_ids=count[None] + first, use_cache=False)
            except Exception:  # a forward may take no positions, or not these
                return 0
            if rms((found.logits[0] - logits).float()) <= rounding_of(logits) * rms(logits.float()):
                return first
        return 0


@contextmanager
def without_checks(models: Sequence[nn.Module]) -> Iterator[None]:
    """Let models of transformers look for no padding in the tokens for the body: a recorded step has no values."""
    try:
        for model in models:
            vars(model)[CHECK] = _check_nothing
        yield
    finally:
        for model in models:
            vars(model).pop(CHECK, None)


def _check_nothing(*args: Any) -> None:
    """Stand for transformers' warning about padding without a mask."""


def base_of(model: nn.Module) -> nn.Module:
    """Return the part of a causal language model that computes its hidden states.

    Raises:
        ValueError: If there is none.
    """
    inner = find_causal_model(model)
    base: nn.Module = inner.base_model
    if base is inner:
        raise ValueError(f"{NAME}: embeddings must be of a model with a part without the head, got {type(inner)}")
    return base


def step_bytes(model: nn.Module) -> int:
    """Return the bytes of weights that a step reads: all but the embedding, of which it reads one row per token."""
    inner = find_causal_model(model)
    embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    if isinstance(embedding, BlockEmbedding):
        return bytes_of(model) - embedding.weight_bytes
    table = getattr(embedding, "weight", None)
    if table is None:
        raise Unserved("its tokens have several embeddings")
    shared = isinstance(head, nn.Module) and head._parameters.get("weight") is table
    return bytes_of(model) - (0 if shared else table.nbytes)
