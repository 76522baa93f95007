"""LoRARequest, as in vLLM, and AdapterSlots: which adapter is in which slot of the model's Adapters.

An adapter is read when a request first names it; the one that was unused for longest makes room. Rank 0 of a sharded
model sends what it has read to the others; ranks of torchrun that make the same calls read and compare.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from weakref import WeakSet

from ..checkpoints import LoRALayer, read_lora
from ..nn import Adapters, LoRASite
from .config import EngineConfig
from .model import ServedModel
from .runner import Runner, TPRunner
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
        ValueError: If the model has no projections that adapters could name.
    """

    def __init__(self, model: ServedModel, config: EngineConfig) -> None:
        sites = model.lora_sites()
        if not sites:
            raise ValueError(f"{_NAME}: enable_lora must be left out for a model without linear layers")
        self.adapters = Adapters(sites, config.max_loras, config.max_lora_rank, model.dtype, model.device)
        self._tp_group = model.tp_group
        self._lock = threading.Lock()
        self._loaded: dict[LoRARequest, LoadedAdapter] = {}  # the one that was asked for last comes last
        self._loads = 0

    def use(self, lora: object, request: Request, runner: Runner | TPRunner) -> None:
        """Give a request its adapter, which is loaded if it is in no slot.

        Args:
            lora: The request's LoRARequest.
            request: Gets the adapter.
            runner: Has the adapters of all ranks.

        Raises:
            FileNotFoundError: If the adapter's folder or a file of it does not exist.
            RuntimeError: If a rank has ended.
            ValueError: For an adapter of another kind or of another base, if all slots are in use, or if ranks that
                read it themselves find different ones.
        """
        with self._lock:
            adapter = self._find(lora, runner)
            adapter.users.add(request)
            request.adapter = adapter

    def load(self, lora: object, runner: Runner | TPRunner) -> None:
        """Load an adapter if it is in no slot; arguments and errors as use."""
        with self._lock:
            self._find(lora, runner)

    def _find(self, lora: object, runner: Runner | TPRunner) -> LoadedAdapter:
        if not isinstance(lora, LoRARequest):
            raise ValueError(f"{_NAME}: lora_request must be a LoRARequest or None, got {lora!r}")
        adapter = self._loaded.pop(lora) if lora in self._loaded else self._load(lora, runner)
        self._loaded[lora] = adapter
        return adapter

    def _load(self, lora: LoRARequest, runner: Runner | TPRunner) -> LoadedAdapter:
        taken = {one.slot for one in self._loaded.values()}
        slot = next((i for i in range(self.adapters.slots) if i not in taken), None)
        unused = None if slot is not None else next((one for one in self._loaded.values() if not one.is_used), None)
        if slot is None and unused is None:
            raise ValueError(
                f"{_NAME}: unfinished requests must have at most max_loras adapters, {self.adapters.slots}, got "
                f"{lora.lora_name!r} besides {', '.join(repr(one.lora_name) for one in self._loaded)}"
            )
        alone = self._tp_group is None or isinstance(runner, TPRunner)
        layers = self._read(lora) if alone else self._read_on_all_ranks(lora)
        if unused is not None:
            del self._loaded[unused.request]
            slot = unused.slot
        assert slot is not None
        runner.set_adapter(slot, layers)
        self._loads += 1
        return LoadedAdapter(lora, slot, -self._loads)

    def _read(self, lora: LoRARequest) -> dict[str, LoRALayer]:
        layers = read_lora(Path(lora.lora_path), self.adapters.rank, _NAME).layers
        check_layers(lora, layers, self.adapters.sites)
        return layers

    def _read_on_all_ranks(self, lora: LoRARequest) -> dict[str, LoRALayer]:
        """Read an adapter where all ranks make this call, each with its own files."""
        assert self._tp_group is not None
        layers: dict[str, LoRALayer] = {}
        failure: Exception | None = None
        try:
            layers = self._read(lora)
        except (OSError, ValueError) as error:
            failure = error  # raised after the others know, because they wait for this rank
        try:
            self._tp_group.must_agree(f"the adapter {lora.lora_name!r}", digest_of(layers))
        except ValueError as different:
            raise different from failure
        if failure is not None:
            raise failure
        return layers


def digest_of(layers: Mapping[str, LoRALayer]) -> bytes:
    """Return 32 bytes that differ for adapters with other layers or numbers."""
    digest = sha256()
    for name, layer in sorted(layers.items()):
        digest.update(f"{name} {[list(factor.shape) for factor in layer]}".encode())
        for factor in layer:
            digest.update(factor.contiguous().numpy().data)
    return digest.digest()


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
        wanted, found = sites[name].shape, (b.shape[0], a.shape[1])
        if wanted != found:
            raise ValueError(
                f"{_NAME}: the adapter {lora.lora_name!r} must be of this model, whose {name} is {list(wanted)}, got "
                f"one for {list(found)}"
            )
