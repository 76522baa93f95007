"""Embeddings: how the last hidden states of a prompt become one vector, and what a model's folder says of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

NAME, SCORE = "torch_infini.LLM.embed", "torch_infini.LLM.score"
Pooling = Literal["last", "mean", "cls", "max", "mean_sqrt_len"]
KINDS: tuple[str, ...] = get_args(Pooling)
# Modes of sentence-transformers' Pooling that are served.
_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
_MODULES = "Transformer, Pooling, Dense and Normalize"  # of sentence-transformers: those that are served
# Activation functions of Dense modules, by the names of torch's modules.
_ACTIVATIONS: dict[str, type[torch.nn.Module]] = {
    name: getattr(torch.nn, name) for name in ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
}


class Dense(NamedTuple):
    """A layer of sentence-transformers that maps pooled vectors to others: activation(weight @ vector + bias).

    Attributes:
        weight: [out_features, in_features], float32.
        bias: [out_features], or None.
        activation: A module without parameters.
    """

    weight: Tensor
    bias: Tensor | None
    activation: torch.nn.Module

    def __call__(self, vector: Tensor) -> Tensor:
        with torch.inference_mode():
            found: Tensor = self.activation(torch.nn.functional.linear(vector, self.weight, self.bias))
        return found


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """How the hidden states after the model's last norm become a vector, in float32.

    Args:
        pooling: "last": the state of the last token; "mean": the mean of all tokens' states; "cls": that of the first;
            "max": the largest of each column; "mean_sqrt_len": their sum divided by the square root of their number.
        normalize: Whether the vector is divided by its length; a zero vector stays.
        dimensions: How many of the first elements are kept, before they are normalized; None: all.
        truncate_prompt_tokens: A prompt's first tokens are kept, this many; -1: as many as the model takes; None: all.
        prompt_name: The name of the folder's prompt with which a text begins; None: the folder's default, or none.

    Raises:
        ValueError: For another value.
    """

    pooling: Pooling = "last"
    normalize: bool = True
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        if self.pooling not in KINDS:
            raise ValueError(f"{NAME}: pooling must be {', '.join(KINDS)}, got {self.pooling!r}")
        if not isinstance(self.normalize, bool):
            raise ValueError(f"{NAME}: normalize must be True or False, got {self.normalize!r}")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise ValueError(f"{NAME}: dimensions must be an integer of at least 1 or None, got {self.dimensions!r}")
        most = self.truncate_prompt_tokens
        if most not in (None, -1) and (type(most) is not int or most < 1):
            rule = "an integer of at least 1, -1 or None"
            raise ValueError(f"{NAME}: truncate_prompt_tokens must be {rule}, got {most!r}")
        if self.prompt_name is not None and not isinstance(self.prompt_name, str):
            raise ValueError(f"{NAME}: prompt_name must be a text or None, got {self.prompt_name!r}")

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
        is_first = start == 0 or pooled is None
        if self.pooling == "max":
            largest = states.float().amax(0)
            return largest if is_first else torch.maximum(pooled, largest)  # type: ignore[arg-type]  # not None
        total = states.float().sum(0)
        return total if is_first else pooled + total  # type: ignore[operator]  # not None

    def finish(self, pooled: Tensor, tokens: int, dense: tuple[Dense, ...] = ()) -> Tensor:
        """Return the vector of a prompt of so many tokens, on the CPU."""
        counts = {"mean": float(tokens), "mean_sqrt_len": math.sqrt(tokens)}
        vector = (pooled / counts[self.pooling] if self.pooling in counts else pooled).cpu()
        for layer in dense:
            vector = layer(vector)
        vector = vector[: self.dimensions]
        length = torch.linalg.vector_norm(vector)
        return vector / length if self.normalize and length > 0 else vector.clone()


@dataclass(frozen=True, kw_only=True)
class ScoreParams(PoolingParams):
    """How a classifier's logits become scores, in float32; the other settings but truncate_prompt_tokens are unused.

    Args:
        activation: Applied to the logits [labels].
    """

    activation: torch.nn.Module = field(default_factory=torch.nn.Identity)

    @property
    def reuses_prefix(self) -> bool:
        return False

    def add(self, pooled: Tensor | None, start: int, states: Tensor) -> Tensor:
        """Return the logits [labels] of a text, whose chunk is whole; `states` are [1, labels]."""
        return states[-1].float()

    def finish(self, pooled: Tensor, tokens: int, dense: tuple[Dense, ...] = ()) -> Tensor:
        """Return the scores [labels], on the CPU."""
        with torch.inference_mode():
            found: Tensor = self.activation(pooled.cpu())
        return found.clone()


@dataclass(frozen=True)
class PoolingDefaults:
    """What a model's folder says of its embeddings.

    Attributes:
        params: For requests that do not say otherwise.
        any_dimensions, dimensions: Whether embeddings may be cut to any size, and the sizes to which they may be cut.
        hidden_size: The size of a whole embedding; None: not known.
        unsupported: What the folder asks for and is not served; None: nothing.
        dense: Layers between pooling and normalization.
        prompts: Beginnings of texts, by name.
        prompt_name: Which of them texts get that do not say; None: none.
        max_seq_length: The most tokens of a text; None: what the model takes.
        lower: Whether texts are lowered before they are tokenized.
        activation: Of the logits of a classifier with one label, by the name of torch's module; None: Sigmoid.
        is_multi_label: Whether the labels of a classifier exclude each other not.
    """

    params: PoolingParams = PoolingParams()
    any_dimensions: bool = False
    dimensions: tuple[int, ...] = ()
    hidden_size: int | None = None
    unsupported: str | None = None
    dense: tuple[Dense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    prompt_name: str | None = None
    max_seq_length: int | None = None
    lower: bool = False
    activation: str | None = None
    is_multi_label: bool = False

    def scores(
        self, labels: int, use_activation: bool | None = None, truncate_prompt_tokens: int | None = None
    ) -> ScoreParams:
        """Return the settings of a request for a classifier's scores.

        Args:
            labels: The number of its labels.
            use_activation: Whether logits become probabilities (or what the folder's activation makes of them); None:
                True.
            truncate_prompt_tokens: As PoolingParams.
        """
        if use_activation not in (None, True, False):
            raise ValueError(f"{SCORE}: use_activation must be True, False or None, got {use_activation!r}")
        made: torch.nn.Module = torch.nn.Softmax(-1)
        if use_activation is False:
            made = torch.nn.Identity()
        elif labels == 1:
            name = self.activation or "Sigmoid"
            if name not in _ACTIVATIONS:
                known = ", ".join(_ACTIVATIONS)
                raise ValueError(f"{SCORE}: use_activation must be False, for the folder's is none of {known}: {name}")
            made = _ACTIVATIONS[name]()
        elif self.is_multi_label:
            made = torch.nn.Sigmoid()
        return ScoreParams(truncate_prompt_tokens=truncate_prompt_tokens, activation=made)

    def prepare(self, text: str, prompt_name: str | None = None) -> str:
        """Return a text as it is tokenized: with its beginning, lowered if the model's folder says so.

        Args:
            text: The text.
            prompt_name: The name of the beginning; None: the folder's default, or none.
        """
        text = self.beginning(prompt_name) + text
        return text.lower() if self.lower else text

    def beginning(self, prompt_name: str | None = None) -> str:
        """Return the prompt of a name, with which texts begin; ValueError for one that the folder has not."""
        prompt_name = self.prompt_name if prompt_name is None else prompt_name
        if prompt_name is not None and prompt_name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "None, for the model's folder has no prompts"
            raise ValueError(f"{NAME}: prompt_name must be {known}, got {prompt_name!r}")
        return "" if prompt_name is None else self.prompts[prompt_name]

    def merge(
        self,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> PoolingParams:
        """Return the settings of a request, None for the model's; ValueError for some that the model does not allow."""
        if self.unsupported is not None and pooling is None:
            raise ValueError(f"{NAME}: pooling must be given for this model, whose folder asks for {self.unsupported}")
        given = {
            "pooling": pooling,
            "normalize": normalize,
            "dimensions": dimensions,
            "truncate_prompt_tokens": truncate_prompt_tokens,
            "prompt_name": prompt_name,
        }
        fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        params = replace(self.params, **fields)
        self.beginning(prompt_name)  # raises for a name that is not known
        if dimensions is not None and not self.any_dimensions and dimensions not in self.dimensions:
            sizes = ", ".join(map(str, self.dimensions))
            rule = f"one of {sizes}, or None" if sizes else "None, for the model's config names no sizes"
            raise ValueError(f"{NAME}: dimensions must be {rule} (is_matryoshka), got {dimensions}")
        if dimensions is not None and self.hidden_size is not None and dimensions > self.hidden_size:
            raise ValueError(f"{NAME}: dimensions must be at most {self.hidden_size}, got {dimensions}")
        return params


def pooling_defaults(folder: Path, is_encoder: bool = False) -> PoolingDefaults:
    """Read what a folder says of its embeddings.

    modules.json and the folders of its Pooling and Dense, config_sentence_transformers.json and
    sentence_bert_config.json (all sentence-transformers'), and is_matryoshka of config.json.

    Args:
        folder: The model's.
        is_encoder: Whether its tokens see later ones: without modules.json, vectors are then means.
    """
    found = _read(folder / "config.json")
    config = found if isinstance(found, dict) else {}
    sizes, width = config.get("matryoshka_dimensions"), config.get("hidden_size", config.get("dim"))
    dimensions = tuple(size for size in sizes if type(size) is int) if isinstance(sizes, list) else ()
    may_cut = config.get("is_matryoshka") is True and not dimensions
    params = PoolingParams(pooling="mean" if is_encoder else "last")
    base = PoolingDefaults(params, may_cut, dimensions, width if type(width) is int else None)
    multi = config.get("problem_type") == "multi_label_classification"
    base = replace(base, activation=_activation_of(folder, config), is_multi_label=multi)
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list):
        return base
    kind, normalize, unsupported, dense = params.pooling, False, None, list[Dense]()
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        path = folder / str(module.get("path", "")) if isinstance(module, dict) else folder
        if name == "Normalize":
            normalize = True
        elif name == "Pooling":
            options = _read(path / "config.json")
            modes = modes_of(options)
            if len(modes) == 1 and modes[0] in _MODES:
                kind = _MODES[modes[0]]  # type: ignore[assignment]  # of KINDS
            else:
                unsupported = f"pooling by {' and '.join(modes) or 'nothing'}"
            if isinstance(options, dict) and options.get("include_prompt") is False:
                unsupported = "pooling without the prompt's tokens (include_prompt)"
        elif name == "Dense" and not normalize:
            try:
                dense.append(read_dense(path))
            except ValueError as error:
                unsupported = f"a module 'Dense' that cannot be read: {error}"
        elif name != "Transformer":
            unsupported = f"a module {name or module!r}, where {_MODULES} are known"
    params = PoolingParams(pooling=kind, normalize=normalize)
    base = replace(base, params=params, unsupported=unsupported, **_text_settings(folder))
    if dense and unsupported is None:
        base = replace(base, dense=tuple(dense), hidden_size=len(dense[-1].weight))
    return base


def _activation_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the name of a cross-encoder's activation, as sentence-transformers stores it; None: it names none."""
    stored, named = config.get("sentence_transformers"), _read(folder / "config_sentence_transformers.json")
    for values, key in ((stored, "activation_fn"), (config, "sbert_ce_default_activation_function")):
        if isinstance(values, dict) and isinstance(values.get(key), str):
            return str(values[key]).rpartition(".")[2]
    given = named.get("activation_fn") if isinstance(named, dict) else None
    return given.rpartition(".")[2] if isinstance(given, str) else None


def _text_settings(folder: Path) -> dict[str, Any]:
    """Return the fields of PoolingDefaults that say how texts are tokenized."""
    named, length = _read(folder / "config_sentence_transformers.json"), _read(folder / "sentence_bert_config.json")
    named, length = (one if isinstance(one, dict) else {} for one in (named, length))
    prompts = named.get("prompts")
    texts = {name: text for name, text in prompts.items() if isinstance(text, str)} if isinstance(prompts, dict) else {}
    default, most = named.get("default_prompt_name"), length.get("max_seq_length")
    return {
        "prompts": texts,
        "prompt_name": default if default in texts else None,
        "max_seq_length": most if type(most) is int and most > 0 else None,
        "lower": length.get("do_lower_case") is True,
    }


def read_dense(folder: Path) -> Dense:
    """Read a Dense module of sentence-transformers: config.json, and model.safetensors or pytorch_model.bin.

    Raises:
        ValueError: If a file is missing or is not one of a Dense module; the message says what is wrong.
    """
    config = _read(folder / "config.json")
    given = config.get("activation_function", "torch.nn.modules.activation.Tanh") if isinstance(config, dict) else None
    name = str(given).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"its activation must be one of {known}, got {given!r}")
    try:
        if (folder / "model.safetensors").is_file():
            from safetensors.torch import load_file

            tensors = load_file(folder / "model.safetensors")
        else:
            tensors = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        weight, bias = tensors["linear.weight"].float(), tensors.get("linear.bias")
        bias = None if bias is None else bias.float()
        sizes = config["out_features"], config["in_features"]
        if weight.shape != sizes or (bias is not None and bias.shape != sizes[:1]):
            raise ValueError(f"weights of {tuple(weight.shape)} for features {sizes}")
    except Exception as error:  # torch and safetensors raise whatever broken files lead to
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{folder.name} must hold its config.json and tensors, got {cause}") from error
    return Dense(weight, bias, _ACTIVATIONS[name]())


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
