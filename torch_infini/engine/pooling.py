"""Embeddings: how the last hidden states of a prompt become one vector, and what a model's folder says of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

NAME = "torch_infini.LLM.embed"
Pooling = Literal["last", "mean", "cls"]
KINDS: tuple[str, ...] = get_args(Pooling)
# Modes of sentence-transformers' Pooling that are served.
_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How the hidden states after the model's last norm become a vector, in float32.

    Args:
        pooling: "last": the state of the last token; "mean": the mean of all tokens' states; "cls": that of the first.
        normalize: Whether the vector is divided by its length; a zero vector stays.
        dimensions: How many of the first elements are kept, before they are normalized; None: all.

    Raises:
        ValueError: For another value.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.pooling not in KINDS:
            raise ValueError(f"{NAME}: pooling must be {', '.join(KINDS)}, got {self.pooling!r}")
        if not isinstance(self.normalize, bool):
            raise ValueError(f"{NAME}: normalize must be True or False, got {self.normalize!r}")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise ValueError(f"{NAME}: dimensions must be an integer of at least 1 or None, got {self.dimensions!r}")

    @property
    def reuses_prefix(self) -> bool:
        """Whether the states of a cached prefix are not needed."""
        return self.pooling == "last"

    def add(self, pooled: Tensor | None, start: int, states: Tensor) -> Tensor | None:
        """Return what is kept of a prompt's states after a chunk.

        Args:
            pooled: The result for the chunks before it; unused if the chunk is the first.
            start: The index of the chunk's first token.
            states: The chunk's states [tokens, hidden_size].
        """
        if self.pooling == "last":
            return states[-1].float()
        if self.pooling == "cls":
            return states[0].float() if start == 0 else pooled
        total = states.float().sum(0)
        return total if start == 0 or pooled is None else pooled + total

    def finish(self, pooled: Tensor, tokens: int) -> Tensor:
        """Return the vector of a prompt of so many tokens, on the CPU."""
        vector = pooled / tokens if self.pooling == "mean" else pooled
        vector = vector[: self.dimensions].cpu()
        length = torch.linalg.vector_norm(vector)
        return vector / length if self.normalize and length > 0 else vector.clone()


@dataclass(frozen=True)
class PoolingDefaults:
    """What a model's folder says of its embeddings.

    Attributes:
        params: For requests that do not say otherwise.
        any_dimensions, dimensions: Whether embeddings may be cut to any size, and the sizes to which they may be cut.
        hidden_size: The size of a whole embedding; None: not known.
        unsupported: What the folder asks for and is not served; None: nothing.
    """

    params: PoolingParams = PoolingParams()
    any_dimensions: bool = False
    dimensions: tuple[int, ...] = ()
    hidden_size: int | None = None
    unsupported: str | None = None

    def merge(
        self, pooling: Pooling | None = None, normalize: bool | None = None, dimensions: int | None = None
    ) -> PoolingParams:
        """Return the settings of a request, None for the model's; ValueError for some that the model does not allow."""
        if self.unsupported is not None and pooling is None:
            raise ValueError(f"{NAME}: pooling must be given for this model, whose folder asks for {self.unsupported}")
        given = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
        fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        params = replace(self.params, **fields)
        if dimensions is not None and not self.any_dimensions and dimensions not in self.dimensions:
            sizes = ", ".join(map(str, self.dimensions))
            rule = f"one of {sizes}, or None" if sizes else "None, for the model's config names no sizes"
            raise ValueError(f"{NAME}: dimensions must be {rule} (is_matryoshka), got {dimensions}")
        if dimensions is not None and self.hidden_size is not None and dimensions > self.hidden_size:
            raise ValueError(f"{NAME}: dimensions must be at most {self.hidden_size}, got {dimensions}")
        return params


def pooling_defaults(folder: Path) -> PoolingDefaults:
    """Read modules.json and the folder of its Pooling (sentence-transformers), and is_matryoshka of config.json."""
    found = _read(folder / "config.json")
    config = found if isinstance(found, dict) else {}
    sizes, width = config.get("matryoshka_dimensions"), config.get("hidden_size")
    dimensions = tuple(size for size in sizes if type(size) is int) if isinstance(sizes, list) else ()
    may_cut = config.get("is_matryoshka") is True and not dimensions
    base = PoolingDefaults(PoolingParams(), may_cut, dimensions, width if type(width) is int else None)
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list):
        return base
    kind, normalize, unsupported = "last", False, None
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if name == "Normalize":
            normalize = True
        elif name == "Pooling":
            modes = modes_of(_read(folder / str(module.get("path", "")) / "config.json"))
            if len(modes) == 1 and modes[0] in _MODES:
                kind = _MODES[modes[0]]
            else:
                unsupported = f"pooling by {' and '.join(modes) or 'nothing'}"
        elif name != "Transformer":
            unsupported = f"a module {name or module!r}"
    params = PoolingParams(pooling=kind, normalize=normalize)  # type: ignore[arg-type]  # of KINDS
    return replace(base, params=params, unsupported=unsupported)


def modes_of(config: Any) -> list[str]:
    """Return the modes of a Pooling's config."""
    if not isinstance(config, dict):
        return []
    if isinstance(config.get("pooling_mode"), str):
        return [config["pooling_mode"]]
    return [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]


def _read(path: Path) -> Any:
    """Return a JSON file's content; None if there is none, or it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
