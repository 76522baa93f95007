"""OwnCacheModel: a causal language model of transformers with the engine's interface, where PagedModel refuses it.

Each sequence has the cache that transformers gives it, and is computed alone, as by generate. Models without a cache
compute all tokens of a sequence again in each step.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...distributed import TPGroup
from ...nn import Batch, KVCache, LoRASite, MixedKVCache, RotarySwitch
from ...nn.states import SequenceStates
from ..checks.trial import without_side_effects
from ..layers.memory import use_large_pages
from .causal_model import NAME, check_model
from .config import config_of, positions_of
from .model import base_of, step_bytes, without_checks
from .sites import Unserved
from .trial import compare, trial_tokens

_PREFIX = 4096  # tokens of a prefix that is kept, in the engine's account of memory
_logger = logging.getLogger("torch_infini")


class Kept(NamedTuple):
    """What is kept of a sequence.

    Attributes:
        tokens: All that were computed.
        cache: The arguments by which transformers' generate passes the cache on; empty: there is none.
    """

    tokens: list[int]
    cache: dict[str, Any]


class OwnCaches(SequenceStates):
    """A Kept for each row; None is an empty sequence.

    Args:
        rows: The number of sequences.

    Attributes:
        rows: The contents.
    """

    def __init__(self, rows: int) -> None:
        super().__init__([], rows)
        self.rows: list[Kept | None] = [None] * rows

    def reset(self, rows: Sequence[int]) -> None:
        """As SequenceStates'."""
        for row in rows:
            self.rows[row] = None

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As SequenceStates'; a cache changes in place, so that each row has its own."""
        with torch.inference_mode(False), torch.no_grad():
            for source, target in pairs:
                self.rows[target] = copy.deepcopy(self.rows[source])


class OwnCacheModel:
    """A model of transformers, called as torch_infini.models.Llama is.

    Args:
        model: A causal language model, patched or not; on one device, in evaluation mode from now on.
        reason: Why it does not run over the engine's cache.
        tp_group: As PagedModel's.

    Attributes:
        model, reason, tp_group: As given.
        config: Its PagedConfig.
        dtype: The dtype of returned logits.
        device: The model's device.
        bytes_per_step: Bytes of weights that a step reads for each of its sequences.
        kernels_only: False, because a step also runs ops of torch.
        is_recordable: False, because caches grow.
        rotary_switch: None; the model's own forward sees the length of a sequence.
        has_cache: Whether its forward takes a cache; else a step computes all tokens of a sequence again.

    Raises:
        ValueError: For a model that is computed otherwise in parts than in one call, with the reason.
    """

    kernels_only = False
    rotary_switch: RotarySwitch | None = None

    def __init__(self, model: nn.Module, reason: str = "", tp_group: TPGroup | None = None) -> None:
        self.model, self.reason, self.tp_group = model, reason, tp_group
        self._inner, self.device = check_model(model)
        model.eval()
        use_large_pages(model)
        self.is_recordable = False
        self._models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
        self._keeps = "logits_to_keep" in inspect.signature(self._inner.forward).parameters
        tokens = trial_tokens(self._inner).to(self.device)
        try:
            with without_side_effects(model), without_checks(self._models):
                try:
                    logits = self.model(input_ids=tokens[None], use_cache=False).logits[0]
                except Exception as error:  # a forward that needs other arguments may raise anything
                    cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                    raise Unserved(f"it does not run {len(tokens)} tokens: {cause}") from error
                if logits.shape[:-1] != tokens.shape or not logits.isfinite().all():
                    raise Unserved("its logits are NaN or infinite, or not a row for each token")
                self.bytes_per_step = step_bytes(model)
                self.dtype = logits.dtype
                self.config = config_of(self._inner, logits, positions_of(self._inner), 1)
                self.has_cache, self._token_bytes, self._sequence_bytes = True, 1, 1
                try:
                    compare(self, tokens, logits)
                    self._token_bytes, self._sequence_bytes = self._measure(tokens)
                except Unserved as reason:
                    _logger.debug("%s: %s", NAME, reason)
                    self.has_cache = False
                    compare(self, tokens, logits)
        except Unserved as unserved:
            raise ValueError(f"{NAME}: {type(self._inner).__name__} cannot be served: {unserved}") from unserved

    def __call__(
        self, batch: Batch, cache: KVCache | MixedKVCache, last: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Compute new tokens of one or more sequences; arguments and result as Llama.forward's."""
        wanted = None if batch.wanted is None or not last else set(batch.wanted.tolist())
        rows = []
        for number, (row, start, new) in enumerate(chunks_of(batch)):
            logits = self._run(row, start, new, caches_of(cache), self.model, 1 if last else len(new)).logits[0]
            if wanted is None or number in wanted:
                rows.append(logits[-1 if last else -len(new) :])
        logits = torch.cat(rows).to(self.dtype)
        return logits if out is None else out.copy_(logits)

    def hidden_states(self, batch: Batch, cache: KVCache | MixedKVCache) -> Tensor:
        """Compute the states of new tokens after the last norm, transformers' last_hidden_state; as Llama's.

        Raises:
            ValueError: If the model has no part that computes them alone.
        """
        base = base_of(self.model)
        found = [
            self._run(row, start, new, caches_of(cache), base, None).last_hidden_state[0][-len(new) :]
            for row, start, new in chunks_of(batch)
        ]
        return torch.cat(found)

    def new_cache(
        self, blocks: int, block_size: int, dtype: torch.dtype | None = None, sequences: int = 1
    ) -> KVCache | MixedKVCache:
        """Make a cache that counts blocks, whose memory is not taken, with rows for the caches of `sequences`.

        Raises:
            ValueError: For int8, because transformers' caches have the model's dtype.
        """
        if dtype not in (None, self.dtype):
            raise ValueError(
                f"{NAME}: kv_cache_dtype must be 'auto' for a model that runs with transformers' own cache, got {dtype}"
            )
        columns = max(self._token_bytes // (2 * self.dtype.itemsize), 1)
        cache = KVCache(1, blocks, 1, block_size, columns, self.dtype, self.device)
        cache.states = OwnCaches(sequences)
        return cache

    def lora_sites(self) -> dict[str, LoRASite]:
        """Raise ValueError: adapters of requests are added in a batch's order of tokens, which no call here has."""
        raise ValueError(
            f"{NAME}: enable_lora must be False for a model that runs with transformers' own cache, got True (merge "
            "the adapter with peft)"
        )

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes by which a token lets the model's cache grow."""
        return max(self._token_bytes, 2 * self.dtype.itemsize)

    @property
    def bytes_per_sequence(self) -> int:
        """The bytes of a cache of _PREFIX tokens: so much a prefix may take that is kept."""
        return self._sequence_bytes + min(self.config.max_position_embeddings, _PREFIX) * self._token_bytes

    def _run(self, row: int, start: int, new: list[int], caches: OwnCaches, module: nn.Module, keep: int | None) -> Any:
        """Compute new tokens of a row's sequence by the model or a part of it, and keep its cache.

        Args:
            row: Of `caches`.
            start: The place of the first new token, behind those kept.
            new: The tokens.
            caches: What is kept of each sequence.
            module: What to call.
            keep: How many of the last tokens' logits are needed; None: the module has none.
        """
        kept = caches.rows[row] or Kept([], {})
        assert start == len(kept.tokens), f"row {row} has {len(kept.tokens)} tokens, and is to go on at {start}"
        tokens = kept.tokens + new
        more = {"logits_to_keep": keep} if self._keeps and keep is not None else {}
        # Caches are changed in place, which no inference tensor could be later.
        with torch.inference_mode(False), torch.no_grad(), without_checks(self._models):
            ids = torch.tensor([tokens], device=self.device)
            if not self.has_cache:
                found = module(input_ids=ids, use_cache=False, return_dict=True, **more)
                caches.rows[row] = Kept(tokens, {})
                return found
            passed = {"attention_mask": torch.ones_like(ids), "use_cache": True}
            inputs = self._inner.prepare_inputs_for_generation(
                ids, next_sequence_length=len(new), is_first_iteration=not kept.tokens, **passed, **kept.cache, **more
            )
            caches.rows[row] = None  # an interrupted call leaves a cache in any state
            found = module(**inputs, return_dict=True)
            updated = self._inner._update_model_kwargs_for_generation(found, {**passed, **kept.cache})
            cache = {name: value for name, value in updated.items() if name not in passed}
            if not cache:
                raise Unserved("its forward returns no cache")
            caches.rows[row] = Kept(tokens, cache)
            return found

    def _measure(self, tokens: Tensor) -> tuple[int, int]:
        """Return the bytes by which each token lets a cache grow, and those of an empty one."""
        caches, sizes, half = OwnCaches(1), [], len(tokens) // 2
        for start, new in ((0, tokens[:half].tolist()), (half, tokens[half:].tolist())):
            self._run(0, start, new, caches, self.model, 1)
            assert caches.rows[0] is not None
            sizes.append(sum(tensor.nbytes for tensor in tensors_of(caches.rows[0].cache)))
        per_token = max(-(-(sizes[1] - sizes[0]) // (len(tokens) - half)), 1)
        return per_token, max(sizes[1] - len(tokens) * per_token, 1)


def caches_of(cache: KVCache | MixedKVCache) -> OwnCaches:
    """Return the rows of a result of OwnCacheModel.new_cache."""
    caches = cache.states
    assert isinstance(caches, OwnCaches), "the engine passes the model's own cache"
    return caches


def chunks_of(batch: Batch) -> Iterator[tuple[int, int, list[int]]]:
    """Yield each sequence's row, the place of its first new token, and the new tokens."""
    assert batch.states is not None, "the engine gives each sequence a row"
    rows, tokens, lengths = batch.states.tolist(), batch.tokens.tolist(), batch.seq_lens.tolist()
    starts = range(len(rows) + 1) if batch.cum_seq_lens_q is None else batch.cum_seq_lens_q.tolist()
    for row, length, first, end in zip(rows, lengths, starts[:-1], starts[1:], strict=True):
        yield row, length - (end - first), tokens[first:end]


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a cache of transformers, each once."""
    waiting, seen = [value], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, (nn.Module, PreTrainedConfig, type)):
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, (list, tuple, set)):
            waiting += each
        elif hasattr(each, "__dict__"):
            waiting += vars(each).values()
