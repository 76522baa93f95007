"""ServedModel: what the engine runs; Decoder, and PagedModel and OwnCacheModel of patch/paged, have this interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..distributed import TPGroup
from ..nn import Batch, EmbeddedPrompt, KVCache, LoRASite, MixedKVCache, RotarySwitch


class ServedConfig(Protocol):
    """The settings of a model that the engine reads.

    Attributes:
        vocab_size: Columns of the logits.
        max_position_embeddings: The longest sequence.
        num_attention_heads, num_key_value_heads: Query and key heads of a layer.
        bos_token_id: None if there is none.
        eos_token_ids: The end-of-sequence tokens; may be empty.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class ServedModel(Protocol):
    """A causal language model over a paged cache.

    Attributes:
        config: Its settings.
        dtype: Of logits, and of keys and values unless they are int8.
        device: Where it is.
        tp_group: The group that shards it; None: it is not sharded.
        bytes_per_step: Bytes of weights that a step reads.
        bytes_per_sequence: Bytes of states that it keeps of a sequence beside keys and values; 0: none.
        kernels_only: Whether its decode step calls only ops of torch.ops.infini.
        is_recordable: Whether its decode step may be recorded.
        rotary_switch: How a batch says which of two rotations a token gets; None: the model has one.
    """

    tp_group: TPGroup | None
    is_recordable: bool

    @property
    def config(self) -> ServedConfig: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def bytes_per_step(self) -> int: ...
    @property
    def bytes_per_sequence(self) -> int: ...
    @property
    def kernels_only(self) -> bool: ...
    @property
    def rotary_switch(self) -> RotarySwitch | None: ...

    def __call__(self, batch: Batch, cache: Any, last: bool = False, out: Tensor | None = None) -> Tensor:
        """Compute the logits of new tokens; as torch_infini.models.Decoder.forward."""

    def hidden_states(self, batch: Batch, cache: Any) -> Tensor:
        """Compute the states [tokens, hidden_size] of new tokens after the last norm."""

    def new_cache(
        self, blocks: int, block_size: int, dtype: torch.dtype | None = None, sequences: int = 1
    ) -> KVCache | MixedKVCache:
        """Make a cache, with states of so many sequences if the model keeps any; dtype None: the model's."""

    def lora_sites(self) -> dict[str, LoRASite]:
        """Return the projections that adapters may change, by the names that adapters have for them."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a token's keys and values in a cache of that dtype."""


@runtime_checkable
class ReadsImages(Protocol):
    """A ServedModel whose prompts may have images, too.

    Attributes:
        without_images: Why they can have none; "": they can.
        embeds_on_all_ranks: Whether its ranks share what encodes images, so that all of them must call embed.
    """

    @property
    def without_images(self) -> str: ...
    @property
    def embeds_on_all_ranks(self) -> bool: ...

    def embed(self, tokens: Sequence[int], inputs: Mapping[str, Tensor]) -> EmbeddedPrompt:
        """Encode the images of a prompt; ValueError for inputs that the model does not take."""


def is_served_model(model: object) -> bool:
    """Return whether an object has the interface of ServedModel."""
    names = ("config", "dtype", "device", "tp_group", "bytes_per_step", "kernels_only", "is_recordable", "new_cache")
    more = ("rotary_switch", "bytes_per_sequence")
    return callable(model) and all(hasattr(model, name) for name in (*names, *more))
