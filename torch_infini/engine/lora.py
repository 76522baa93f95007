"""LoRARequest, as in vLLM, and AdapterSlots: which adapter is in which slot of the model's Adapters.

An adapter is read when a request first names it; the one that was unused for longest makes room.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

from ..checkpoints import LoRALayer, read_lora
from ..nn import Adapters, LoRASite
from .config import EngineConfig
from .model import ServedModel
from .sampling_params import is_integer
from .sequence import Request

_NAME = "torch_infini.LLM"
MAX_RANK = 1024  # of an adapter


@dataclass(frozen=True)
class LoRARequest:
    """The adapter of a request.

    Attributes:
        lora_name: Its name, for the caller.
        lora_int_id: Its number, at least 1. Adapters are the same if all three attributes are.
        lora_path: The folder that peft's save_pretrained wrote.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path = ""

    def __post_init__(self) -> None:
        name = "torch_infini.LoRARequest"
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise ValueError(f"{name}: lora_name must be a name, got {self.lora_name!r}")
        if not is_integer(self.lora_int_id) or self.lora_int_id < 1:
            raise ValueError(f"{name}: lora_int_id must be an integer of at least 1, got {self.lora_int_id!r}")
        if not isinstance(self.lora_path, str | Path) or not str(self.lora_path):
            raise ValueError(f"{name}: lora_path must be the folder of an adapter, got {self.lora_path!r}")


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in a slot.

    Attributes:
        request: What it was loaded for.
        slot: Its slot.
        root: Identity of the empty prefix of its sequences: keys and values of other adapters are not theirs.
        users: The requests with it, finished ones too, as far as someone still has them.
    """

    request: LoRARequest
    slot: int
    root: int
    users: WeakSet[Request] = field(default_factory=WeakSet)

    @property
    def is_used(self) -> bool:
        # A request that is still being made has no sequences.
        return any(not request.sequences or not request.is_finished for request in self.users)


class AdapterSlots:
    """Loads adapters into the slots of an engine's model.

    Args:
        model: Its projections may get adapters.
        config: Of the engine: max_loras and max_lora_rank.

    Attributes:
        adapters: The model's Adapters.

    Raises:
        ValueError: If the model is sharded, or has no projections that adapters could name.
    """

    def __init__(self, model: ServedModel, config: EngineConfig) -> None:
        if model.tp_group is not None:
            raise ValueError(
                f"{_NAME}: enable_lora must be left out with tensor_parallel_size {model.tp_group.size}: adapters are "
                "not sharded yet"
            )
        sites = model.lora_sites()
        if not sites:
            raise ValueError(f"{_NAME}: enable_lora must be left out for a model without linear layers")
        self.adapters = Adapters(sites, config.max_loras, config.max_lora_rank, model.dtype, model.device)
        self._lock = threading.Lock()
        self._loaded: dict[LoRARequest, LoadedAdapter] = {}  # the one that was asked for last comes last
        self._loads = 0

    def use(self, lora: object, request: Request) -> None:
        """Give a request its adapter, which is loaded if it is in no slot.

        Raises:
            FileNotFoundError: If the adapter's folder or a file of it does not exist.
            ValueError: For an adapter of another kind or of another base, or if all slots are in use.
        """
        with self._lock:
            adapter = self._find(lora)
            adapter.users.add(request)
            request.adapter = adapter

    def load(self, lora: object) -> None:
        """Load an adapter if it is in no slot; errors as use."""
        with self._lock:
            self._find(lora)

    def _find(self, lora: object) -> LoadedAdapter:
        if not isinstance(lora, LoRARequest):
            raise ValueError(f"{_NAME}: lora_request must be a LoRARequest or None, got {lora!r}")
        adapter = self._loaded.pop(lora) if lora in self._loaded else self._load(lora)
        self._loaded[lora] = adapter
        return adapter

    def _load(self, lora: LoRARequest) -> LoadedAdapter:
        taken = {one.slot for one in self._loaded.values()}
        slot = next((i for i in range(self.adapters.slots) if i not in taken), None)
        unused = None if slot is not None else next((one for one in self._loaded.values() if not one.is_used), None)
        if slot is None and unused is None:
            raise ValueError(
                f"{_NAME}: unfinished requests must have at most max_loras adapters, {self.adapters.slots}, got "
                f"{lora.lora_name!r} besides {', '.join(repr(one.lora_name) for one in self._loaded)}"
            )
        layers = read_lora(Path(lora.lora_path), self.adapters.rank, _NAME).layers
        check_layers(lora, layers, self.adapters.sites)
        if unused is not None:
            del self._loaded[unused.request]
            slot = unused.slot
        assert slot is not None
        self.adapters.set(slot, layers)
        self._loads += 1
        return LoadedAdapter(lora, slot, -self._loads)


def largest_rank(adapters: Iterable[LoRARequest]) -> int:
    """Return the largest rank of these adapters, of at least one; errors are those of reading them."""
    return max(read_lora(Path(adapter.lora_path), MAX_RANK, _NAME).rank for adapter in adapters)


def check_layers(lora: LoRARequest, layers: Mapping[str, LoRALayer], sites: Mapping[str, LoRASite]) -> None:
    """Raise ValueError for an adapter of layers that the model does not have, or that have other sizes."""
    for name, (a, b) in layers.items():
        if name not in sites:
            kinds = ", ".join(sorted({site.rpartition(".")[2] for site in sites}))
            raise ValueError(
                f"{_NAME}: the adapter {lora.lora_name!r} must change linear layers of the model ({kinds}), got {name}"
            )
        wanted, found = (sites[name].n, sites[name].k), (b.shape[0], a.shape[1])
        if wanted != found:
            raise ValueError(
                f"{_NAME}: the adapter {lora.lora_name!r} must be of this model, whose {name} is {list(wanted)}, got "
                f"one for {list(found)}"
            )
