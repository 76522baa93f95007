"""EngineConfig in InfiniLM's form, and its conversion to arguments of torch_infini.LLM."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ....models import Llama, LlamaConfig
from ....nn.cache import token_bytes
from ..convert import as_device, as_dtype
from .sampling_params import SamplingParams

_NAME = "infinilm.llm.EngineConfig"
_RENAMED = {
    "max_num_seqs": "max_batch_size",
    "max_model_len": "max_cache_len of a static cache",
    "cache_blocks": "num_blocks",
    "enforce_eager": "not enable_graph",
}


@dataclass
class EngineConfig:
    """A model and the limits of its engine.

    Attributes:
        model_path: A Hugging Face folder on this machine; or a torch_infini.models.Llama, whose device, dtype and ranks
            replace the next three fields.
        device: The model's device: "cpu", "cuda" or "nvidia", torch's or infinicore's. None: the first GPU that torch
            sees, or the CPU on a machine without a GPU. A GPU given here must exist.
        dtype: The dtype of activations and dense weights; None: the checkpoint's.
        tensor_parallel_size: The number of ranks that share the model.
        cache_type: "paged": sequences share num_blocks blocks, and are limited by the model's positions. "static":
            max_cache_len tokens are reserved for each of max_batch_size sequences, and num_blocks is ignored.
        max_batch_size: The most sequences in a step; further requests wait.
        max_tokens: The most tokens of an output whose SamplingParams have no max_tokens.
        num_blocks: The number of blocks of a paged cache. On the CPU, memory is touched only when it is used.
        block_size: Tokens per block.
        max_cache_len: The most tokens of a sequence in a static cache, including the prompt; at most the model's
            positions.
        temperature, top_p, top_k: For requests without SamplingParams.
        enable_graph: Whether decode steps are recorded and replayed.
        settings: Further arguments of torch_infini.LLM, such as weights="int8", kv_cache_dtype="int8", chunk_size, or
            cache_bytes instead of num_blocks.

    Raises:
        ValueError: For an invalid value.
    """

    model_path: str | Path | Llama
    device: Any = None
    dtype: Any = "float16"
    tensor_parallel_size: int = 1
    cache_type: str = "paged"
    max_batch_size: int = 16
    max_tokens: int = 4096
    num_blocks: int = 8192
    block_size: int = 16
    max_cache_len: int = 4096
    temperature: float = 1.0
    top_p: float = 0.8
    top_k: int = 1
    enable_graph: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def of(cls, *values: Any, **more: Any) -> EngineConfig:
        """Make a config from its fields and settings: arguments that are no fields become settings."""
        names = {one.name for one in fields(cls)}
        further = {name: value for name, value in more.items() if name not in names}
        own = {name: value for name, value in more.items() if name in names}
        if further:
            own["settings"] = further | dict(own.get("settings", {}))
        return cls(*values, **own)

    def check(self) -> None:
        """Check everything that can be checked without the model; ValueError."""
        for name in ("tensor_parallel_size", "max_batch_size", "num_blocks", "block_size", "max_cache_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{_NAME}: {name} must be an integer of at least 1, got {value!r}")
        if self.cache_type not in ("paged", "static"):
            raise ValueError(f'{_NAME}: cache_type must be "paged" or "static", got {self.cache_type!r}')
        if not isinstance(self.enable_graph, bool):
            raise ValueError(f"{_NAME}: enable_graph must be True or False, got {self.enable_graph!r}")
        for name, ours in _RENAMED.items():
            if name in self.settings:
                raise ValueError(f"{_NAME}: {name} must be given as {ours}, got {self.settings[name]!r}")
        self.default_params()

    def default_params(self) -> SamplingParams:
        """Return the SamplingParams of requests without any."""
        return SamplingParams(self.temperature, self.top_p, self.top_k, self.max_tokens)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of torch_infini.LLM.

        Raises:
            FileNotFoundError: For a folder that does not exist, or has no config.json.
            ValueError: For an invalid value or an unsupported model.
            MemoryError: If the cache does not fit into memory.
        """
        self.check()
        found: dict[str, Any] = {
            "model": self.model_path,
            "max_num_seqs": self.max_batch_size,
            "block_size": self.block_size,
            "enforce_eager": not self.enable_graph,
        }
        if isinstance(self.model_path, Llama):
            model = self.model_path.config
            device, dtype = self.model_path.embed.weight.device, self.model_path.dtype
        else:
            model = LlamaConfig.from_pretrained(self.model_path)
            device = default_device() if self.device is None else as_device(_NAME, self.device, "device")
            dtype = (model.dtype or torch.float32) if self.dtype is None else as_dtype(_NAME, self.dtype)
            found |= {"device": device, "dtype": dtype, "tensor_parallel_size": self.tensor_parallel_size}
        if "cache_bytes" not in self.settings:
            found["cache_blocks"] = self.num_blocks
        if self.cache_type == "static":
            found["max_model_len"] = min(self.max_cache_len, model.max_position_embeddings)
            found["cache_blocks"] = self.max_batch_size * -(-found["max_model_len"] // self.block_size)
        if "cache_blocks" in found:
            stored = torch.int8 if self.settings.get("kv_cache_dtype") == "int8" else dtype
            self._check_memory(found["cache_blocks"], model, stored, device)
        return found | dict(self.settings)

    def _check_memory(self, blocks: int, model: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Check that the cache, when fully used, fits into the memory that is free now; MemoryError."""
        ranks = self.tensor_parallel_size
        heads = max(model.num_key_value_heads, ranks)
        if device.type != "cpu":
            heads //= ranks  # each rank has its own device
        block_bytes = self.block_size * token_bytes(model.num_hidden_layers, heads, model.head_dim, dtype)
        free = free_memory(device)
        if free is not None and blocks * block_bytes > free:
            name = "num_blocks" if self.cache_type == "paged" else "max_batch_size rows of max_cache_len"
            raise MemoryError(
                f"{_NAME}: {name} must fit into memory, where {free // block_bytes} blocks of {self.block_size} tokens "
                f"do ({free / 2**30:.1f} GiB are free), got {blocks} blocks ({blocks * block_bytes / 2**30:.1f} GiB)"
            )


def default_device() -> torch.device:
    """Return the first GPU that torch sees, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a device's memory; None if the system does not report them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = []
    with suppress(OSError, ValueError, IndexError):
        rest = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2]
        found.append(1024 * int(rest.split()[0]))
    with suppress(OSError, ValueError, KeyError):  # "max" means no limit
        limit, used, more = (
            Path("/sys/fs/cgroup", f"memory.{name}").read_text() for name in ("max", "current", "stat")
        )
        counts = dict(line.split() for line in more.splitlines())
        # Page cache, which the system drops under pressure.
        files = int(counts["inactive_file"]) + int(counts["active_file"])
        found.append(max(0, int(limit) - int(used) + files))
    return min(found, default=None)
