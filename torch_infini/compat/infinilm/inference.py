"""InferEngine: InfiniLM's engine. The caller manages sequences and blocks; forward computes an Input.

All state is in `_Rank`, so that attributes of a caller's subclass cannot collide with it.
"""

from __future__ import annotations

import difflib
import threading
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...distributed import TPGroup, init_tp_group
from ...engine.decode import DecodeSteps, power_of_two
from ...engine.runner import Worker
from ...models import Llama, Slot, load_checkpoint
from ...models import LlamaConfig as ModelConfig
from ...nn import Batch, KVCache, RotarySwitch
from . import inputs
from .cache import UNLIMITED, CacheConfig, PagedKVCacheConfig, StaticKVCacheConfig, without_subclass
from .config import LlamaConfig
from .convert import as_device, as_dtype, as_infinicore, as_tensor, like, underlying
from .distributed import DistConfig
from .hooks import HookRegistry, tapped
from .inputs import WHERE, paged_batch, static_batch
from .sampling import by_fixed_number, drawn, each_seed, settings

_NAME = "infinilm.InferEngine"
_MAX_LISTED = 10  # names listed in an error
_SCALE = 0.02  # standard deviation of random weights


class InferEngine:
    """A model whose parameters and inputs come from the caller. Threads may call it concurrently; passes are
    serialized.

    A pass with one new token per row is recorded at the first call with that number of rows, and then replayed.

    Args:
        config: The model's sizes.
        distributed_config: The devices of the tensor-parallel group. For NVIDIA one device, by its number. On the CPU
            they are processes: under torchrun its processes, which all make the same calls; otherwise this process and
            workers that it starts, which divide this process's threads among themselves.
        device_type: The model's device: torch's or InfiniCore's device, its type, its name, or a number of infinicore.h
            (0: CPU, 1: NVIDIA). None: infinicore's current device, or the CPU without infinicore.
        cache_config: How keys and values are stored. None: as StaticKVCacheConfig(), whose memory is allocated when the
            first pass needs it.

    Raises:
        ValueError: For a config that validate() rejects, a device that does not exist, or too few bytes for a block.
        TypeError: For a config of another type.
        NotImplementedError: For more than one NVIDIA device.
        MemoryError: For a cache that does not fit into memory.

    Example:
        >>> engine = InferEngine(AutoConfig.from_pretrained(folder), cache_config=StaticKVCacheConfig(4, 512))
        >>> for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        >>>     engine.load_param(name, tensor)
        >>> ids, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([0])
        >>> token = engine.forward(InferEngine.Input(ids, cache_lengths=lengths, top_k=1)).output_ids
    """

    Input = inputs.Input
    Output = inputs.Output

    def __init__(
        self,
        config: LlamaConfig,
        distributed_config: DistConfig | None = None,
        device_type: Any = None,
        cache_config: CacheConfig | None = None,
    ) -> None:
        config = _instance("config", config, LlamaConfig)
        distributed = _instance("distributed_config", distributed_config or DistConfig(), DistConfig)
        device = as_device(_NAME, device_type)
        size = len(distributed.tp_device_ids)
        if size > 1 and device.type != "cpu":
            raise NotImplementedError(
                f"{_NAME}: distributed_config must name one device, for ranks share models on the CPU alone as yet, "
                f"got {distributed}"
            )
        if device.type == "cuda" and device.index is None:
            device = as_device(_NAME, f"cuda:{distributed.tp_device_ids[0]}")
        if cache_config is not None:
            cache_config = _instance("cache_config", cache_config, CacheConfig)
        arguments = config.to_model(), as_dtype(_NAME, config._dtype), device
        tp_group = init_tp_group(size) if size > 1 else None
        if tp_group is not None and tp_group.workers is not None:
            tp_group.workers.make(_Rank, *arguments, cache_config and without_subclass(cache_config))
        self._rank = _Rank(tp_group, *arguments, cache_config)
        self._distributed = distributed

    def load_param(self, name: str, param: Any) -> None:
        """Set a parameter.

        Args:
            name: The Hugging Face name: "model.layers.0.self_attn.q_proj.weight". "lm_head.weight" of a tied embedding
                and a checkpoint's "inv_freq" are accepted and ignored.
            param: The whole tensor, infinicore's or torch's, of any floating dtype, or an object with one as
                `_underlying`. Its values are copied to the memory that passes read; no other copy is made.

        Raises:
            ValueError: For a name, shape or dtype that does not fit the model.
            TypeError: For a name that is not a string, or a param that is not a tensor.
        """
        self._rank.load(name, param)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the parameters by name as infinicore tensors.

        Returns:
            A dict for each device that this process serves, with that device's shards. Those of this process are views
            of the memory that passes read, those of others copies.
        """
        others = [] if self._rank.workers is None else self._rank.workers.call("state")
        return [{name: as_infinicore(x) for name, x in state.items()} for state in (self._rank.state(), *others)]

    def forward(self, input: inputs.Input, *, seed: int | Sequence[int] | Tensor | None = None) -> inputs.Output:
        """Compute the new tokens of all rows, and the next token of each.

        Without a seed the tokens are InfiniLM's, whose random number is always 0.1: with the row's probabilities p in
        descending order after temperature, the token is the first at which their sum reaches
        0.1 * min(sum of the top_k first, top_p); otherwise torch_infini.ops.random_sample draws it.

        Args:
            input: The tokens to compute, and how the next ones are chosen.
            seed: For real random numbers: one for all rows, or one per row. The offset in a row's stream is the length
                of its sequence, so the same seed serves all of its passes; rows of equal length that share a seed share
                the random number.

        Returns:
            The tokens: [rows, 1], or [rows] if the input uses the newer names. They are torch's if input_ids are,
            otherwise infinicore's.

        If no parameter was loaded at all, the first call warns and fills them with random numbers, the same in every
        process, for benchmarks.

        Raises:
            TypeError, ValueError: For an invalid input; nothing is computed then.
            RuntimeError: If some parameters are missing, the logits are not finite, or a worker has ended.
            The exceptions of a HookRegistry's callbacks.
        """
        if not isinstance(input, inputs.Input):
            raise TypeError(f"{WHERE}: input must be an InferEngine.Input, got {type(input).__name__}")
        with self._rank.lock:
            tokens = self._rank.forward(input, seed)
        return inputs.Output(like(input.input_ids)(tokens if input.names_newer_lengths else tokens[:, None]))

    def reset_cache(self, cache_config: CacheConfig | None = None) -> None:
        """Drop all sequences.

        Args:
            cache_config: The new config; memory is reallocated, after the old memory is freed, only if the sizes
                differ. None: keep the config.

        Raises:
            ValueError, TypeError, MemoryError: As the constructor.
        """
        if cache_config is not None:
            cache_config = _instance("cache_config", cache_config, CacheConfig)
        self._rank.reset(cache_config)

    def get_cache_config(self) -> CacheConfig:
        """The cache's config."""
        return self._rank.cache_config

    def register_hooks(self, registry: HookRegistry | None) -> None:
        """Call a registry's callbacks, including those registered later, in every pass; None: stop.

        Raises:
            ValueError: If a callback's tensor is not one of the model's; forward checks those registered later.
            TypeError: For another object.
        """
        if registry is not None:
            _instance("registry", registry, HookRegistry).check(self._rank.model)
        self._rank.hooks = registry

    def __repr__(self) -> str:
        return f"<InferEngine: {self._distributed!r}>"


class _Rank(Worker):
    """The state of one rank: its shard of the model, the names of missing parameters, and the cache. Rank 0 sends
    its
    calls to its workers."""

    def __init__(
        self,
        tp_group: TPGroup | None,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        cache_config: CacheConfig | None,
    ) -> None:
        self.workers = None if tp_group is None else tp_group.workers
        self.model = Llama(config, dtype=dtype, device=device, tp_group=tp_group)
        super().__init__(self.model)
        self.device = device
        self.slots: dict[str, Slot] = self.model.slots()
        self.missing = set(self.slots)
        self.hooks: HookRegistry | None = None
        self.cache_config: CacheConfig = cache_config or StaticKVCacheConfig()
        self.cache: KVCache | None = None
        self.steps: DecodeSteps | None = None
        self.lock = threading.RLock()
        self.cached = torch.zeros(0, dtype=torch.int64)
        if cache_config is not None:
            self.reset(cache_config, send=False)

    def load(self, name: str, param: Any) -> None:
        where = f"{_NAME}.load_param"
        if not isinstance(name, str):
            raise TypeError(f"{where}: name must be a string, got {type(name).__name__}")
        slot = self.slots.get(name)
        if slot is None:
            if self.has_elsewhere(name):
                return
            close = difflib.get_close_matches(name, self.slots, 3, 0)
            raise ValueError(
                f"{where}: name must be a parameter of the model, such as {', '.join(close)}, got {name!r}"
            )
        tensor = as_tensor(where, name, param)
        if tuple(tensor.shape) != slot.shape:
            raise ValueError(f"{where}: {name} must have shape {list(slot.shape)}, got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"{where}: {name} must be of a floating dtype, got {tensor.dtype}")
        if self.workers is not None:
            self.workers.send("load", name, tensor)
        slot.load(slot.cut(tensor), 0)
        self.missing.discard(name)

    def state(self) -> dict[str, Tensor]:
        return {name: slot.read() for name, slot in self.slots.items()}

    def load_folder(self, folder: str | Path) -> None:
        if self.workers is not None:
            self.workers.send("load_folder", folder)
        load_checkpoint(folder, self.slots, self.has_elsewhere)
        self.missing.clear()

    def check_loaded(self, where: str) -> None:
        """Raise RuntimeError if some parameters are missing; if all are, warn and make random ones."""
        with self.lock:
            if not self.missing:
                return
            some = sorted(self.missing)
            more = f" and {len(some) - _MAX_LISTED} more" if len(some) > _MAX_LISTED else ""
            names = f"{', '.join(some[:_MAX_LISTED])}{more}"
            if len(self.missing) < len(self.slots):
                raise RuntimeError(f"{where}: all parameters must have been loaded, got none for {names}")
            if self.model.tp_group is None or self.model.tp_group.rank == 0:
                warnings.warn(
                    f"{where}: no parameter has been loaded, so all are random numbers: {names}", stacklevel=2
                )
            if self.workers is not None:
                self.workers.send("fill")
            self.fill()

    def fill(self) -> None:
        """Fill norms with ones, biases with zeros, and weights with random numbers that their names determine."""
        for name, slot in self.slots.items():
            tensor = torch.zeros(slot.shape, device=self.device)
            if len(slot.shape) > 1:
                generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
                tensor.normal_(0, _SCALE, generator=generator)
            elif not name.endswith(".bias"):
                tensor.fill_(1)
            slot.load(slot.cut(tensor), 0)
        self.missing.clear()

    def has_elsewhere(self, name: str) -> bool:
        """Return whether a checkpoint's tensor follows from the config, or shares another tensor's memory."""
        return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and self.model.shares_embedding)

    def reset(self, config: CacheConfig | None, send: bool = True) -> None:
        config = config or self.cache_config
        blocks, size = self.sizes(config)
        cache = self.cache
        if cache is None or (cache.blocks, cache.block_size) != (blocks, size):
            self.cache = cache = self.steps = None  # frees its memory before the new cache's is allocated
            try:
                self.cache = self.model.new_cache(blocks, size)
            except (RuntimeError, OSError, OverflowError) as error:
                raise MemoryError(
                    f"{_NAME}: cache_config must be one that fits into memory, got {config}: {error}"
                ) from error
            if send and self.workers is not None:
                refusals = list(filter(None, self.workers.call("try_reset", without_subclass(config))))
                if refusals:
                    self.cache = None  # the workers may have none; the next pass creates all of them
                    raise MemoryError(refusals[0])
        elif send and self.workers is not None:
            self.workers.send("reset", without_subclass(config))
        self.cache_config = config
        self.cached = torch.zeros(blocks, dtype=torch.int64)

    def try_reset(self, config: CacheConfig) -> str:
        """Reset the cache of a worker; return the message of an error that leaves the worker usable, or ""."""
        try:
            self.reset(config)
        except MemoryError as error:
            return str(error)
        return ""

    def sizes(self, config: CacheConfig) -> tuple[int, int]:
        """The number of blocks and tokens per block; for a static cache the rows and their length."""
        c = self.model.config
        if isinstance(config, StaticKVCacheConfig):
            length = config.max_cache_len()
            return config.max_batch_size(), c.max_position_embeddings if length in (0, UNLIMITED) else length
        if not isinstance(config, PagedKVCacheConfig):
            kind = type(config).__name__
            raise TypeError(f"{_NAME}: cache_config must be a StaticKVCacheConfig or a PagedKVCacheConfig, got {kind}")
        blocks, size = config.num_blocks(), config.block_size()
        if blocks is None:
            columns = c.num_hidden_layers * self.model.kv_heads * c.head_dim
            block = 2 * columns * size * self.model.dtype.itemsize
            memory = config.max_kv_memory_bytes()
            blocks = (memory or 0) // block
            if blocks < 1:
                raise ValueError(
                    f"{_NAME}: max_kv_memory_bytes must be at least {block}, those of one block over all layers (give "
                    f"a number of blocks as num_blocks=), got {memory}"
                )
        return blocks, size

    @torch.no_grad()
    def forward(self, input: inputs.Input, seed: Any) -> Tensor:
        self.check_loaded(WHERE)
        if self.cache is None:
            self.reset(None)
        cache, c = self.cache, self.model.config
        assert cache is not None
        static = isinstance(self.cache_config, StaticKVCacheConfig)
        if static:
            batch = static_batch(input, self.cached, cache.block_size, c.vocab_size, c.max_position_embeddings)
        else:
            batch = paged_batch(input, cache.blocks, cache.block_size, c.vocab_size, c.max_position_embeddings)
        batch = rotated_by_length(batch, self.model.rotary_switch)
        n = len(batch.seq_lens)
        rows = settings(WHERE, n, input.temperature, input.top_k, input.top_p)
        seeds = None if seed is None else each_seed(WHERE, n, seed)
        lengths, starts = batch.seq_lens, batch.cum_seq_lens_q
        if static:  # if the pass fails, it may have overwritten the tokens after these
            self.cached[:n] = lengths - (1 if starts is None else starts.diff())
        tapped_by = self.hooks if self.hooks is not None and self.hooks.has_hooks() else None
        whole = tapped_by is not None
        with tapped(self.model, tapped_by, like(input.input_ids)):
            if self.workers is not None:
                self.workers.send("compute", batch, whole)
                with self.workers.relay_errors():
                    logits = self.compute(batch, whole)
            else:
                if self.model.tp_group is not None and starts is not None:
                    whole = self.model.tp_group.any(whole)  # under torchrun each rank has its own hooks
                logits = self.compute(batch, whole)
        if static:
            self.cached[:n] = lengths
        tokens = by_fixed_number(logits, rows) if seeds is None else drawn(logits, rows, seeds, lengths)
        return tokens.cpu()

    @torch.no_grad()
    def compute(self, batch: Batch, whole: bool) -> Tensor:
        """Compute the logits of the last token of each row.

        Args:
            whole: Run the modules on all tokens, for hooks of this rank or another.
        """
        assert self.cache is not None
        if batch.cum_seq_lens_q is None and not whole:
            return self.decode(batch)
        return self.model(_on(self.device, batch), self.cache, last=True, whole=whole)

    def decode(self, batch: Batch) -> Tensor:
        """Compute the logits of a batch with one new token per row by a recorded step."""
        assert self.cache is not None
        if self.steps is None:
            self.steps = DecodeSteps(self.model, self.cache)
        rows, blocks = batch.block_tables.shape
        # Tables grow, so round up: not every width needs its own step.
        step = self.steps.step(rows, power_of_two(blocks))
        step.inputs.copy_(torch.stack((batch.tokens, batch.positions, batch.slot_mapping, batch.seq_lens)))
        step.tables[:, :blocks] = batch.block_tables
        return step.run()


def rotated_by_length(batch: Batch, switch: RotarySwitch | None) -> Batch:
    """Return the batch with its positions as a model with two rotations (longrope) has them.

    As in a call of transformers, the new tokens of a sequence get the rotation of its length, these tokens included.
    """
    if switch is None:
        return batch
    starts, is_long = batch.cum_seq_lens_q, batch.seq_lens > switch.length
    of_tokens = is_long if starts is None else is_long.repeat_interleave(starts.diff())
    return replace(batch, positions=switch.row(batch.positions, of_tokens))


def _on(device: torch.device, batch: Batch) -> Batch:
    if device.type == "cpu":
        return batch
    return Batch(**{name: x.to(device) for name, x in vars(batch).items() if x is not None})


def _instance(name: str, value: Any, kind: type) -> Any:
    """Return the value, or the object in its `_underlying`, as an instance of a class; else raise TypeError."""
    for candidate in (value, underlying(value)):
        if isinstance(candidate, kind):
            return candidate
    raise TypeError(f"{_NAME}: {name} must be a {kind.__name__}, got {type(value).__name__}")
