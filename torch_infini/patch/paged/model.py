"""PagedModel: a causal language model of transformers with the engine's interface: it takes a batch and a paged cache.

Its own forward runs, patched or not; only attention is computed elsewhere (calls.py). A trial finds and rejects models
that keep more than keys and values from one token to the next, or that see other tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...checkpoints import Activations
from ...distributed import TPGroup
from ...nn import Batch, KVCache, LoRASite, MixedKVCache
from ...nn.cache import token_bytes
from ...nn.states import SequenceStates, StateShape
from ...ops import FLOATS
from ..checks.probe import HALF
from ..checks.trial import rms, without_side_effects
from ..files.foreign import class_named, load
from ..layers import interface
from ..layers.memory import use_large_pages
from ..layers.packed_linear import bytes_of, packs_weights
from ..layers.paged import PAGED_NAME
from ..layers.state_space import reads_weight
from .calls import PagedBackend
from .rotation import find_switch, place_by_row, position_modules, rotary_modules, rotate_by_row
from .sites import Unserved, configs_of, find_sites, implementation, value_of

_NAME = "torch_infini.LLM"
_BLOCK = 4  # tokens of a block in the trial
_POSITIONS = 1 << 17  # of a model whose config names none
_STATE_TOKENS = 256  # between two states of a sequence that are kept: the engine's chunk
CHECK = "warn_if_padding_and_no_attention_mask"  # a method of transformers' models
_logger = logging.getLogger("torch_infini")


@dataclass(frozen=True)
class PagedConfig:
    """The values of a model's config that the engine reads.

    Attributes:
        model_type: The model's type in transformers.
        vocab_size: Columns of the logits.
        max_position_embeddings: The longest sequence that is served.
        num_attention_heads, num_key_value_heads: Heads of the first layer.
        bos_token_id: None if there is none.
        eos_token_ids: The end-of-sequence tokens; may be empty.
    """

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    num_attention_heads: int
    num_key_value_heads: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


class PagedModel:
    """A model of transformers, called as torch_infini.models.Llama is.

    Args:
        model: A causal language model, patched or not; on one device, in evaluation mode from now on.

    Attributes:
        model: The given model.
        config: Its PagedConfig.
        dtype: The dtype of keys, values and returned logits.
        device: The model's device.
        tp_group: None, because the model is not sharded.
        kernels_only: False, because a step also runs ops of torch.
        is_recordable: Whether a decode step may be recorded; False after one could not be.
        rotary_switch: The length at which it changes its rotation (longrope), or None.

    Raises:
        ValueError: For a model whose attention or state the cache does not hold, with the reason.
    """

    tp_group: TPGroup | None = None
    kernels_only = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        inner, self.device = check_model(model)
        model.eval()
        use_large_pages(model)
        interface.register()
        self._configs = configs_of(model)
        self._models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        self._keeps = "logits_to_keep" in inspect.signature(inner.forward).parameters
        text = inner.config.get_text_config()
        positions = int(getattr(text, "max_position_embeddings", None) or _POSITIONS)
        vocabulary = int(getattr(text, "vocab_size", 0)) or inner.get_input_embeddings().weight.shape[0]
        tokens = trial_tokens(vocabulary).to(self.device)
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
                        _NAME,
                        rule,
                    )
                    positions = rule
                ends = inner.generation_config.eos_token_id
                kv_heads = sites[0].kv_heads if sites else 1
                self.config = PagedConfig(
                    text.model_type,
                    logits.shape[-1],
                    positions,
                    value_of(text, "num_attention_heads", kv_heads),
                    kv_heads,
                    inner.generation_config.bos_token_id,
                    () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends),
                )
                self.is_recordable = True
                self._first = 0
                placing = self._place_by_row()
                try:
                    self._try(tokens, logits)
                finally:
                    for handle in placing:
                        handle.remove()
        except Unserved as unserved:
            raise ValueError(f"{_NAME}: {type(inner).__name__} cannot be served: {unserved}") from unserved
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
        inner = find_causal_model(self.model)
        base = inner.base_model
        if base is inner:
            raise ValueError(f"{_NAME}: embeddings must be of a model with a part without the head, got {type(inner)}")
        backend = PagedBackend(self._sites, batch, cache, self.rotary_switch)
        tokens, positions = batch.tokens[None], backend.positions[None] + self._first
        with torch.inference_mode(False), torch.no_grad(), implementation(self._configs, PAGED_NAME, backend):
            found = base(input_ids=tokens, position_ids=positions, use_cache=False)
        states: Tensor = found.last_hidden_state[0]
        return states

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
                sites[name] = LoRASite(module, 0, slice(0, n), slice(0, k), (n, k))
        return sites

    @property
    def bytes_per_step(self) -> int:
        """Bytes of weights that a step reads: all but the embedding, of which it reads one row per token.

        All experts of a mixture are counted.
        """
        inner = find_causal_model(self.model)
        table = inner.get_input_embeddings().weight
        head = inner.get_output_embeddings()
        shared = isinstance(head, nn.Module) and head._parameters.get("weight") is table
        return bytes_of(self.model) - (0 if shared else table.nbytes)

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
            return self._compare(tokens, logits)
        except Unserved as reason:
            self._first = self._find_first(tokens, logits)
            if not self._first:
                raise
            places = self.config.max_position_embeddings - self._first
            self.config = replace(self.config, max_position_embeddings=places)
            _logger.debug("%s: positions begin at %d (%s)", _NAME, self._first, reason)
        self._compare(tokens, logits)

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

    def _compare(self, tokens: Tensor, logits: Tensor) -> None:
        """Compute the trial's tokens in parts, and raise Unserved if their logits are not those given."""
        try:
            found = in_parts(self, tokens)
        except Unserved:
            raise
        except Exception as failure:  # a forward that needs other arguments may raise anything
            cause = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
            raise Unserved(f"its forward needs more than tokens and positions: {cause}") from failure
        # The effect of what the cache holds: the same tokens after other text.
        other = tokens.clone()
        other[: len(other) // 2] = other[: len(other) // 2].flip(0)
        with torch.no_grad():
            behind = self.model(input_ids=other[None], use_cache=False).logits[0]
        later = slice(len(tokens) // 2 + 1, None)
        effect = rms((behind - logits)[later].float())
        error, size = rms((found - logits).float()), rms(logits.float())
        # The error may be half of that effect; but rounding alone explains some share of the logits' size.
        rounding = rounding_of(logits)
        if not error <= max(min(effect / 2, 4 * rounding * size), rounding * size):
            raise Unserved(
                f"the logits of {len(tokens)} tokens in parts differ from those in one call by {error:.3g} (root mean "
                f"square; other text before them changes them by {effect:.3g}): it keeps states other than keys and "
                "values, or its positions follow from a mask"
            )


def rounding_of(logits: Tensor) -> float:
    """Return the share of the logits' size that rounding alone explains."""
    return HALF.get(logits.dtype, 4e-5) / 4


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


def in_parts(model: PagedModel, tokens: Tensor) -> Tensor:
    """Compute tokens as an engine does: in two chunks, the second beside another sequence, and then one by one."""
    total = len(tokens)
    blocks = -(-total // _BLOCK)
    cache = model.new_cache(2 * blocks, _BLOCK, sequences=2)
    order = torch.arange(2 * blocks, device=tokens.device).view(blocks, 2).t().contiguous()  # blocks of two sequences
    first, second = total // 3, 2 * total // 3

    def step(*chunks: tuple[int, int, int]) -> Tensor:
        """Compute chunks (sequence, first token, end)."""
        numbers = torch.cat([torch.arange(start, end) for _, start, end in chunks]).to(tokens.device)
        rows = torch.tensor([row for row, start, end in chunks for _ in range(start, end)], device=tokens.device)
        slots = order[rows, numbers // _BLOCK] * _BLOCK + numbers % _BLOCK
        lengths = torch.tensor([end for _, _, end in chunks], device=tokens.device)
        counts = torch.tensor([0, *(end - start for _, start, end in chunks)], device=tokens.device).cumsum(0)
        table = order[[row for row, _, _ in chunks]]
        starts = None if all(end - start == 1 for _, start, end in chunks) else counts
        states = torch.tensor([row for row, _, _ in chunks], device=tokens.device)
        batch = Batch(tokens[numbers], numbers, slots, table, lengths, starts, states=states)
        return model(batch, cache)

    # The other sequence has the same tokens, and its chunks come first.
    parts = [step((0, 0, first)), step((1, 0, 2), (0, first, second))[2:]]
    parts += [step((1, i - second + 2, i - second + 3), (0, i, i + 1))[1:] for i in range(second, total)]
    return torch.cat(parts)


def trial_tokens(vocabulary: int) -> Tensor:
    """Return the ids of the trial: more than a short convolution looks back, and no placeholders of images."""
    low, high = (5, min(vocabulary, 500)) if vocabulary > 20 else (0, vocabulary)
    return torch.randint(low, high, (15,), generator=torch.Generator("cpu").manual_seed(0))


def find_causal_model(model: nn.Module) -> Any:
    """Return the causal language model of transformers in a wrapper, or the model itself.

    Raises:
        ValueError: If there is none.
    """
    found = next(
        (m for m in model.modules() if isinstance(m, PreTrainedModel) and isinstance(m, GenerationMixin)), None
    )
    if found is None or found.get_input_embeddings() is None:
        raise ValueError(
            f"{_NAME}: model must be a causal language model of transformers, a Llama or a folder, got a "
            f"{type(model).__name__}"
        )
    return found


def check_model(model: nn.Module) -> tuple[Any, torch.device]:
    """Return the causal language model in a module, and the device that it is on.

    Raises:
        ValueError: If there is none, or it is not loaded, on several devices, or of a dtype without kernels.
    """
    inner = find_causal_model(model)
    away = next((name for name, tensor in model.named_parameters() if tensor.is_meta), None)
    if away is not None:
        raise ValueError(f"{_NAME}: the model must be loaded, got {away} on meta")
    devices = sorted({str(tensor.device) for tensor in model.parameters()})
    if len(devices) != 1:
        raise ValueError(f"{_NAME}: the model must be on one device, got one on {', '.join(devices) or 'none'}")
    wrong = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype not in FLOATS), None)
    if wrong is not None:
        raise ValueError(f"{_NAME}: the model must be float32, bfloat16 or float16, got {wrong}")
    return inner, torch.device(devices[0])


def is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether transformers has a causal language model of a config's model_type, or of its architectures."""
    return config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or class_named(config) is not None


def load_paged(
    folder: Path,
    weights: str | None,
    dtype: torch.dtype | None,
    device: torch.device | str,
    activations: Activations | None = None,
) -> PagedModel:
    """Load a checkpoint of a model of transformers, patched where possible, for the engine.

    Args:
        folder: A folder or .gguf file.
        weights: As patch_model's; None: dense ones are packed where that is faster.
        dtype: The dtype of activations and dense weights; None: the checkpoint's.
        device: The model's device.
        activations: As torch_infini.load's.

    Raises:
        ValueError: As PagedModel, for a checkpoint that contradicts itself, or weights that it cannot have.
    """
    packs = weights is None and packs_weights(device)
    model = load(folder, dtype, weights, activations, must_patch=False, packs=packs)
    return PagedModel(model.to(device))  # type: ignore[arg-type]  # of transformers
