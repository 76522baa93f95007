"""InferEngine in the form that scripts use: created from a model folder, forward with keywords, and generate.

generate is a loop over forward, which is the low-level engine's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...engine import SamplingParams
from ...engine.sampler import resolve_seeds
from ...engine.sequence import plain_ids
from ...models.config import token_ids
from ...models.folder import checked_config
from .. import infinicore
from .auto_config import AutoConfig
from .cache import CacheConfig, PagedKVCacheConfig
from .config import LlamaConfig
from .convert import as_dtype, as_torch, like
from .distributed import DistConfig
from .inference import InferEngine as LowLevelEngine
from .inputs import Input, Output
from .row_groups import PromptRow, Times, complete, groups

_Engine = TypeVar("_Engine", bound="InferEngine")


@dataclass
class GenerationConfig:
    """How prompts are continued.

    Attributes:
        max_new_tokens: The most new tokens; None: as many as the cache and the model's positions hold.
        temperature: The divisor of logits; 0: always the most likely token.
        top_k: Draw among this many most likely tokens; 0: no limit; 1: always the most likely token.
        top_p: Draw among the most likely tokens that hold this share of the probability.
        eos_token_id: Tokens that end a continuation; None: the model's.
        stop_on_eos: Whether they do.
        seed: The seed of random numbers, from which each row's follow. None: forward's fixed number, the same tokens in
            each call.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    eos_token_id: int | Sequence[int] | None = None
    stop_on_eos: bool = True
    seed: int | None = None


class InferEngine(LowLevelEngine):
    """The low-level engine for a model folder. It reads the folder's config; the parameters are loaded afterwards.

    modeling_utils.load_model_state_dict_by_file loads the folder's safetensors, and from_pretrained makes an engine
    with its parameters. The low-level engine documents a pass without them.

    Args:
        model_path: A Hugging Face folder on this machine, or a LlamaConfig.
        device: As the low-level engine's device_type.
        distributed_config: As in the low-level engine.
        cache_config: As in the low-level engine.
        dtype: The dtype of parameters and activations, torch's or infinicore's, or its name; None: the config's.

    Attributes:
        config: The LlamaConfig.
        dtype: infinicore's dtype of parameters and activations.
        device: The model's infinicore.device.
        enable_paged_attn: Whether the cache is paged.
        use_cache: Kept for callers that set it; a pass always uses the cache.

    Raises:
        FileNotFoundError: For a config.json or file that does not exist.
        ValueError: For an unsupported model, or safetensors that do not fit its config.
        The errors of the low-level engine.
    """

    def __init__(
        self,
        model_path: str | Path | LlamaConfig = "",
        device: Any = None,
        distributed_config: DistConfig | None = None,
        cache_config: CacheConfig | None = None,
        *,
        dtype: Any = None,
    ) -> None:
        if isinstance(model_path, LlamaConfig):
            self.config = model_path if dtype is None else copy.copy(model_path)
        else:
            self.config = AutoConfig.from_pretrained(model_path)
            if any(Path(model_path).glob("*.safetensors")):
                checked_config(model_path)  # before memory is allocated for sizes that are not the files'
        if dtype is not None:
            self.config._dtype = as_dtype(_NAME, dtype)
        self.use_cache = False
        super().__init__(self.config, distributed_config, device, cache_config)
        model = self._rank.model
        self.dtype = infinicore.utils.to_infinicore_dtype(model.dtype)
        self.device = infinicore.device(self._rank.device.type, self._rank.device.index)
        self.enable_paged_attn = isinstance(self.get_cache_config(), PagedKVCacheConfig)

    @classmethod
    def from_pretrained(
        cls: type[_Engine],
        model_path: str | Path,
        device: Any = None,
        dtype: Any = None,
        backend: str = "cpp",
        distributed_config: DistConfig | None = None,
        cache_config: CacheConfig | None = None,
    ) -> _Engine:
        """Make an engine with the parameters of a model folder.

        Args:
            model_path: As for the class. For a folder without safetensors the parameters must be set by load_param.
            device, dtype, distributed_config, cache_config: As for the class.
            backend: "cpp" or "python", InfiniLM's two implementations; both mean this engine.

        Raises:
            ValueError: For another backend; otherwise as the class.
        """
        if backend not in ("cpp", "python"):
            raise ValueError(f"{_NAME}.from_pretrained: backend must be 'cpp' or 'python', got {backend!r}")
        engine = cls(model_path, device, distributed_config, cache_config, dtype=dtype)
        if any(Path(model_path).glob("*.safetensors")):
            engine._rank.load_folder(model_path)
        return engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(
        self,
        input_ids: Any,
        *,
        position_ids: Any = None,
        past_kv_lengths: Any = None,
        total_kv_lengths: Any = None,
        input_offsets: Any = None,
        block_tables: Any = None,
        slot_mapping: Any = None,
        temperature: Any = None,
        top_k: Any = None,
        top_p: Any = None,
        seed: int | Sequence[int] | Tensor | None = None,
    ) -> Any:
        """Compute the new tokens of all rows, and the next token of each.

        Args:
            input_ids: The new tokens, infinicore's or torch's, as in Input; or an Input, without other arguments.
            position_ids, input_offsets, block_tables, slot_mapping: As in Input.
            past_kv_lengths, total_kv_lengths: Input's past_sequence_lengths and total_sequence_lengths.
            temperature, top_k, top_p: As in Input; None: 1.0, 1 and 1.0.
            seed: As in the low-level engine's forward.

        Returns:
            The next token of each row, [rows] int64 on the CPU, torch's if input_ids are, else infinicore's; for an
            Input an Output.

        Raises:
            TypeError: For an Input with other arguments; otherwise as the low-level engine's forward.
        """
        more = {
            "position_ids": position_ids,
            "past_sequence_lengths": past_kv_lengths,
            "total_sequence_lengths": total_kv_lengths,
            "input_offsets": input_offsets,
            "block_tables": block_tables,
            "slot_mapping": slot_mapping,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
        }
        if isinstance(input_ids, Input):
            given = [name for name, value in more.items() if value is not None]
            if given:
                raise TypeError(f"{_NAME}.forward: an Input must come alone, got {', '.join(given)} beside it")
            return super().forward(input_ids, seed=seed)
        more["top_k"] = 1 if top_k is None else top_k  # even if no name of the newer set is used
        output: Output = super().forward(Input(input_ids, **more), seed=seed)
        tokens = output.output_ids
        return tokens if len(tokens.shape) == 1 else tokens.view([tokens.shape[0]])

    def generate(
        self,
        input_ids: Any,
        generation_config: GenerationConfig | None = None,
        *,
        tokenizer: Any = None,
        _measure_and_log_time: bool = False,
        paged_block_size: int = 16,
        **settings: Any,
    ) -> list[Any]:
        """Continue prompts, by forward.

        It uses forward's cache, from the first row or block on: the caller's sequences are dropped. If the rows do not
        all fit into the cache, they are computed in groups, one after the other.

        Args:
            input_ids: [rows, length], infinicore's or torch's, or a list of token ids for each row, of any lengths.
            generation_config: For all rows; None: GenerationConfig().
            tokenizer: Its eos_token_id ends rows, if neither the settings nor the model have one.
            _measure_and_log_time: Whether to print a line with the times of prefill and decode.
            paged_block_size: Has no effect: blocks have the block_size of cache_config.
            **settings: Fields of GenerationConfig that override generation_config's.

        Returns:
            For each step the tokens of all rows, [rows] int64 on the CPU: torch's if input_ids are, else infinicore's.
            There are as many steps as the longest row has new tokens; a row that has ended repeats its last token,
            which is the end token if one ended it.

        Raises:
            TypeError: For an unknown setting, or input_ids of another type.
            ValueError: For invalid prompts or settings.
            RuntimeError: If parameters are missing, or as forward.
        """
        where = f"{_NAME}.generate"
        g, convert, times = replace(generation_config or GenerationConfig(), **settings), like(input_ids), Times()
        prompts, config = _prompts(where, input_ids), self.get_cache_config()
        params = SamplingParams(
            n=max(len(prompts), 1),
            temperature=g.temperature,
            top_k=g.top_k,
            top_p=g.top_p,
            max_tokens=g.max_new_tokens,
            seed=g.seed,
        )
        choice: dict[str, Any] = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        with self._rank.lock:
            self._rank.check_loaded(where)
            blocks, size = self._rank.sizes(config)
            block_size = size if isinstance(config, PagedKVCacheConfig) else None
            c = self._rank.model.config
            room = min(c.max_position_embeddings, size if block_size is None else blocks * size)
            rows = _checked(where, prompts, params, c.vocab_size, room)
            ends = _ends(g, c.eos_token_ids, tokenizer)
            for group in groups(rows, blocks, block_size):
                complete(group, block_size, partial(self.forward, **choice), convert, ends, times)
        if not rows:
            return []
        if _measure_and_log_time:
            print(times.line(rows), flush=True)
        steps = max(len(row.new) for row in rows)
        padded = (row.new + row.new[-1:] * (steps - len(row.new)) for row in rows)
        table = convert(torch.tensor(list(zip(*padded, strict=True))))
        return [table.narrow(0, i, 1).squeeze(0) for i in range(steps)]

    def reset_cache(self, cache_config: CacheConfig | None = None) -> None:
        """As in the low-level engine."""
        super().reset_cache(cache_config)
        self.enable_paged_attn = isinstance(self.get_cache_config(), PagedKVCacheConfig)

    def state_dict_keyname(self) -> list[str]:
        """Return the names of the parameters."""
        return list(self._rank.slots)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool | None = None) -> tuple[list[str], list[str]]:
        """Set parameters by name, as load_param.

        Args:
            state_dict: Tensors by Hugging Face names, infinicore's or torch's.
            strict: True: missing or unknown names are an error, and nothing is set. None: only unknown names are an
                error, so that a checkpoint can be loaded file by file. False: unknown names are ignored.

        Returns:
            (missing names, unknown names), as in infinicore.nn.Module.

        Raises:
            RuntimeError: For missing or unknown names, depending on strict.
            ValueError, TypeError: As load_param.
        """
        known = {name for name in state_dict if name in self._rank.slots or self._rank.has_elsewhere(name)}
        unknown = [name for name in state_dict if name not in known]
        missing = [name for name in self._rank.slots if name not in known]
        wrong = [f"missing: {', '.join(missing)}"] if strict and missing else []
        wrong += [f"unknown: {', '.join(unknown)}"] if strict is not False and unknown else []
        if wrong:
            raise RuntimeError(f"{_NAME}.load_state_dict: the names must be the model's parameters, {'; '.join(wrong)}")
        for name in known:
            self.load_param(name, state_dict[name])
        return missing, unknown


def _prompts(where: str, input_ids: Any) -> list[list[Any]]:
    """Return the prompts of generate, one list each."""
    found = as_torch(input_ids)
    if isinstance(found, Tensor):
        if found.dim() != 2 or found.dtype not in (torch.int64, torch.int32):
            kind = str(found.dtype).removeprefix("torch.")
            raise ValueError(
                f"{where}: input_ids must be int64 or int32 [rows, length], got {kind} {list(found.shape)}"
            )
        return found.tolist()
    if not isinstance(found, Sequence) or not all(
        isinstance(row, Sequence) and not isinstance(row, str) for row in found
    ):
        raise TypeError(f"{where}: input_ids must be a tensor or a list of token ids for each row, got {input_ids!r}")
    return [list(row) for row in found]


def _checked(
    where: str, prompts: Sequence[Sequence[Any]], params: SamplingParams, vocabulary: int, room: int
) -> list[PromptRow]:
    """Return the rows of the prompts; ValueError, before any is computed, if one leaves no room for a new token."""
    seeds = [None] * params.n if params.seed is None else resolve_seeds(params)
    rows = []
    for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=False)):  # without prompts there is a seed too many
        name = f"{where}: input_ids[{i}]"
        tokens = plain_ids(name, prompt, vocabulary)
        if not 1 <= len(tokens) < room:
            raise ValueError(
                f"{name} must have 1 to {room - 1} tokens, fewer than the model's positions and the cache hold, got "
                f"{len(tokens)}"
            )
        end = room if params.max_tokens is None else min(room, len(tokens) + params.max_tokens)
        rows.append(PromptRow(tokens, end, seed))
    return rows


def _ends(g: GenerationConfig, of_model: Sequence[int], tokenizer: Any) -> Sequence[int]:
    """Return the tokens that end a row."""
    if not g.stop_on_eos:
        return ()
    if g.eos_token_id is not None:
        return token_ids(g.eos_token_id)
    return of_model or token_ids(getattr(tokenizer, "eos_token_id", None))


_NAME = "infinilm.infer_engine.InferEngine"
