"""EncoderRunner: computes steps of models without a cache, whose texts are computed whole (patch/encoder.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..nn import LoRAFactors
from .config import EngineConfig
from .runner import ChunkInput, do_nothing

_NAME = "torch_infini.Engine"


@runtime_checkable
class Encoder(Protocol):
    """What a model has that computes whole texts, beside the attributes of a ServedModel; as EncoderModel."""

    @property
    def config(self) -> Any: ...
    @property
    def labels(self) -> int: ...
    @property
    def label_names(self) -> tuple[str, ...]: ...

    def encode(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int] | None]) -> list[Tensor]: ...
    def classify(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int] | None]) -> list[Tensor]: ...


class NoCache:
    """The cache of a model that keeps nothing.

    Args:
        block_size: Tokens of a block, of which there are none.
    """

    states = None
    bytes_per_token = 0

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


class EncoderRunner:
    """Computes chunks that are whole texts; its interface is Runner's.

    Args:
        model: On the device where it runs.
    """

    def __init__(self, model: Encoder) -> None:
        self.model = model
        self.before_compute: Callable[[], object] = do_nothing
        self.prompt_logits: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}

    def run(
        self,
        chunks: Sequence[ChunkInput],
        copies: Sequence[tuple[int, int]] = (),
        state_copies: Sequence[tuple[int, int]] = (),
    ) -> Tensor:
        """Compute the states of all chunks, or their logits [1, labels] as such; the result is empty."""
        self.states = {}  # frees the last ones before others are made
        self.before_compute()
        for scored in (False, True):
            rows = [i for i, chunk in enumerate(chunks) if chunk.scored == scored]
            given = [chunks[i].tokens for i in rows], [chunks[i].types for i in rows]
            found = [one[None] for one in self.model.classify(*given)] if scored else self.model.encode(*given)
            self.states.update(zip(rows, found, strict=True))
        return torch.empty(0, 0)

    def set_adapter(self, slot: int, layers: Mapping[str, LoRAFactors]) -> None:
        raise TypeError(f"{_NAME}: the model must be a decoder for an adapter")


def encoder_config(config: EngineConfig, length: int, kind: str) -> EngineConfig:
    """Return the settings of a scheduler that computes each text whole, in one step.

    Args:
        config: The engine's.
        length: The most tokens of a text.
        kind: The model's type, for messages.

    Raises:
        ValueError: For settings of a cache or of adapters, which an encoder has not.
    """
    for name in ("cache_bytes", "cache_blocks", "kv_cache_dtype", "chunk_size", "speculative_config"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"{_NAME}: {name} must be left out for an encoder ({kind}), which keeps no keys and values, got "
                f"{getattr(config, name)!r}"
            )
    if config.enable_lora:
        raise ValueError(f"{_NAME}: enable_lora must be False for an encoder ({kind}), got True")
    return replace(
        config,
        block_size=length + 1,  # a block for each text, and one for the token that the scheduler expects of a decoder
        cache_blocks=2 * config.max_num_seqs,
        chunk_size=length,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
