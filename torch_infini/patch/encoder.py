"""EncoderModel: an encoder of transformers (BERT, RoBERTa, ModernBERT, ...) that the engine serves: hidden states of
whole texts, and scores of classifiers. Nothing is cached.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..checkpoints import Activations, read_object
from ..ops import FLOATS
from . import is_patched, patch_model
from .checks.probe import HALF
from .checks.trial import rms
from .files.folder import DESCRIPTION
from .files.load import load
from .layers.packed_linear import bytes_of, packs_weights
from .options import PACKED

_NAME = "torch_infini.LLM"
_CAUSAL = ("ForCausalLM", "LMHeadModel")  # ends of class names
_CLASSIFIER = "ForSequenceClassification"
_POSITIONS = 1 << 17  # of a model whose config names none
# Padding of a batch: at most this share of its tokens, or this many tokens. A call of the model costs as much as some.
_PADDING, _FEW = 1 / 8, 16
_logger = logging.getLogger("torch_infini")


@dataclass(frozen=True)
class EncoderConfig:
    """The values of an encoder's config that the engine reads; as engine/model.py's ServedConfig."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    num_attention_heads: int
    num_key_value_heads: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...] = ()


class EncoderModel:
    """An encoder of transformers, called with whole texts.

    Args:
        model: The model with or without a head, patched or not; on one device, in evaluation mode from now on.

    Attributes:
        model: The given model.
        config: Its EncoderConfig.
        dtype, device: Of its parameters.
        labels: The number of a classifier's labels; 0: it classifies nothing.
        label_names: Their names in the model's config, LABEL_0 and so on where that has none.
        pads: Whether texts of several lengths may share a call: padding changes no state.
        bytes_per_step: Bytes of weights that a step reads.

    The others are constants that engine/model.py explains.

    Raises:
        ValueError: For a model that is not loaded, on several devices, of a dtype without kernels, or whose forward
            gives no state for each token.
    """

    tp_group = None
    kernels_only = is_recordable = False
    rotary_switch = None
    bytes_per_sequence = 0

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        config: Any = self.model.config
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        devices = sorted({str(tensor.device) for tensor in tensors.values()})
        if len(devices) != 1 or devices == ["meta"]:
            raise ValueError(f"{_NAME}: the model must be loaded, on one device, got {', '.join(devices) or 'none'}")
        wrong = next((p.dtype for p in tensors.values() if p.is_floating_point() and p.dtype not in FLOATS), None)
        if wrong is not None:
            raise ValueError(f"{_NAME}: the model must be float32, bfloat16 or float16, got {wrong}")
        self.device, self.dtype = torch.device(devices[0]), self.model.dtype
        base: Any = self.model.base_model
        table = base.get_input_embeddings().weight
        padding = getattr(config.get_text_config(), "pad_token_id", None)
        self._pad = padding if isinstance(padding, int) else 0
        self._types = "token_type_ids" in inspect.signature(base.forward).parameters
        self.labels = config.num_labels if type(model).__name__.endswith(_CLASSIFIER) else 0
        names = config.id2label or {}
        self.label_names = tuple(str(names.get(i, f"LABEL_{i}")) for i in range(self.labels))
        heads = int(getattr(config, "num_attention_heads", 1))
        kind, positions = config.model_type, positions_of(base)
        self.config = EncoderConfig(kind, len(table), positions, heads, heads, getattr(config, "bos_token_id", None))
        self.bytes_per_step = bytes_of(model) - table.nbytes
        self.pads = True
        self.pads = self._try()

    def _try(self) -> bool:
        """Compute two texts alone and padded to one length; return whether their states are the same."""
        tokens = [2 + i % max(1, self.config.vocab_size - 2) for i in range(12)]
        texts = [tokens, tokens[:5]]
        try:
            alone = [self.encode([text], [None])[0].float() for text in texts]
            padded = self.encode(texts, [None, None])
        except Exception as error:  # a forward that needs other arguments may raise anything
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ValueError(
                f"{_NAME}: {type(self.model).__name__} cannot be served: its forward needs more than tokens: {cause}"
            ) from error
        if any(len(states) != len(text) for states, text in zip(alone, texts, strict=True)):
            raise ValueError(f"{_NAME}: {type(self.model).__name__} cannot be served: it gives no state for each token")
        rounding = HALF.get(self.dtype, 4e-5) / 4
        same = [rms(one - other.float()) <= rounding * rms(one) for one, other in zip(alone, padded, strict=True)]
        if not all(same):
            _logger.info("%s: texts of different lengths get calls of their own: padding changes their states", _NAME)
        return all(same)

    def encode(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int] | None]) -> list[Tensor]:
        """Compute the states [tokens, hidden_size] of each text after the last layer, transformers' last_hidden_state.

        Args:
            texts: Their tokens, special ones included; none may be empty.
            types: The token_type_ids of each text; None: zeros.
        """
        found: dict[int, Tensor] = {}
        for rows in batches([len(text) for text in texts], self.pads):
            states = self._call(self.model.base_model, [texts[i] for i in rows], [types[i] for i in rows])
            states = states[0]  # last_hidden_state
            found.update({i: states[at, : len(texts[i])] for at, i in enumerate(rows)})
        return [found[i] for i in range(len(texts))]

    def classify(self, texts: Sequence[Sequence[int]], types: Sequence[Sequence[int] | None]) -> list[Tensor]:
        """Compute the logits [labels] of each text; arguments as encode's."""
        found: dict[int, Tensor] = {}
        for rows in batches([len(text) for text in texts], self.pads):
            logits = self._call(self.model, [texts[i] for i in rows], [types[i] for i in rows]).logits
            found.update({i: logits[at] for at, i in enumerate(rows)})
        return [found[i] for i in range(len(texts))]

    def _call(self, model: Any, texts: list[Sequence[int]], types: list[Sequence[int] | None]) -> Any:
        """Call the model with texts, padded at their ends to the longest."""
        longest = max(map(len, texts))

        def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
            return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows], device=self.device)

        more: dict[str, Tensor] = {}
        if min(map(len, texts)) < longest:
            more["attention_mask"] = padded([[1] * len(text) for text in texts], 0)
        if self._types and any(one is not None for one in types):
            found = [[0] * len(text) if one is None else one for text, one in zip(texts, types, strict=True)]
            more["token_type_ids"] = padded(found, 0)
        # With inference tensors a layer would not hand its norm to the next (layers/norm.py).
        with torch.inference_mode(False), torch.no_grad():
            return model(input_ids=padded(texts, self._pad), **more)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return 0: an encoder keeps nothing."""
        return 0


def batches(lengths: Sequence[int], pads: bool = True) -> Iterator[list[int]]:
    """Yield the indices of texts that are padded to one length, so that little of a batch is padding; or none of it."""
    batch: list[int] = []
    tokens = padding = longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        more = padding + longest - lengths[i]
        if batch and more > (max(_FEW, (tokens + lengths[i]) * _PADDING) if pads else 0):
            yield batch
            batch, tokens, padding = [], 0, 0
        if not batch:
            longest, more = lengths[i], 0
        batch.append(i)
        tokens, padding = tokens + lengths[i], more
    if batch:
        yield batch


def positions_of(base: Any) -> int:
    """Return the most tokens of a text: fewer than the config's positions where these begin behind padding's."""
    positions = int(getattr(base.config, "max_position_embeddings", None) or _POSITIONS)
    tables = [m for name, m in base.named_modules() if name.endswith("position_embeddings")]
    first = max((m.padding_idx + 1 for m in tables if getattr(m, "padding_idx", None) is not None), default=0)
    return positions - first


def is_encoder_config(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is an encoder's: its type has masked language models, and it generates nothing."""
    kind, classes = config.get("model_type"), config.get("architectures")
    names = [name for name in classes if isinstance(name, str)] if isinstance(classes, list) else []
    return (
        isinstance(kind, str)
        and kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and not config.get("is_encoder_decoder", "ConditionalGeneration" in MODEL_FOR_MASKED_LM_MAPPING_NAMES[kind])
        and config.get("is_decoder") is not True
        and not any(name.endswith(_CAUSAL) for name in names)
    )


def is_encoder(model: nn.Module) -> bool:
    """Return whether a loaded model of transformers is an encoder, with or without a head."""
    if not isinstance(model, PreTrainedModel) or type(model).__name__.endswith(_CAUSAL):
        return False
    return is_encoder_config({**model.config.to_dict(), "architectures": []})


def encoder_of(model: nn.Module, weights: str | None = None, packs: bool = False) -> EncoderModel:
    """Make an EncoderModel of a loaded encoder, which is patched unless it already is.

    Args:
        model: With a head or without; heads of classifiers are used, others are not.
        weights: As patch_model's; None for a model that is patched.
        packs: Whether to pack dense weights without `weights`.

    Raises:
        ValueError: As EncoderModel, or for weights of a model that is patched.
    """
    used: Any = model if type(model).__name__.endswith(_CLASSIFIER) else getattr(model, "base_model", model)
    if is_patched(used):
        if weights is not None:
            raise ValueError(f"{_NAME}: quantization must be left out for a model that is patched, got {weights!r}")
        return EncoderModel(used)
    base = getattr(used, "base_model", used)
    # A classifier's head has few weights, and its rounding would be the scores'.
    heads = [name for name, part in used.named_children() if base is not used and part is not base]
    otherwise = PACKED if packs else None
    report = patch_model(used, weights=weights or otherwise, skip=heads if weights is not None else ())
    if weights is not None and report.reason:
        raise ValueError(f"{_NAME}: quantization must be left out for this {type(used).__name__}: {report.reason}")
    return EncoderModel(used)


def load_encoder(
    folder: Path,
    weights: str | None,
    dtype: torch.dtype | None,
    device: torch.device | str,
    activations: Activations | None = None,
) -> EncoderModel:
    """Load an encoder's folder, patched where possible.

    Args:
        folder: The model's; one that save_patched wrote is loaded with its integers.
        weights: As patch_model's; None: dense ones are packed where that is faster.
        dtype: Of activations and dense weights; None: the checkpoint's.
        device: The model's device.
        activations: Must be None.

    Raises:
        ValueError: For a folder that cannot be read or lacks tensors of the model, or weights that it cannot have.
    """
    if activations is not None:
        raise ValueError(f"{_NAME}: activations must be left out for an encoder, got {activations!r}")
    if (folder / DESCRIPTION).is_file():
        if weights is not None:
            raise ValueError(
                f"{_NAME}: quantization must be left out for a folder of save_patched, got {weights!r} for {folder}"
            )
        stored: Any = load(folder, PACKED if packs_weights(device) else None)
        return encoder_of((stored if dtype is None else stored.to(dtype)).to(device))
    classes = read_object(folder / "config.json").get("architectures")
    is_classifier = isinstance(classes, list) and any(str(name).endswith(_CLASSIFIER) for name in classes)
    kind: Any = AutoModelForSequenceClassification if is_classifier else AutoModel
    try:
        model, info = kind.from_pretrained(
            folder,
            dtype="auto" if dtype is None else dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers and safetensors raise whatever broken files lead to
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{_NAME}: {folder} must be a model that transformers loads, got: {cause}") from error
    # Many checkpoints lack the pooler, whose output is not used.
    missing = sorted(name for name in info["missing_keys"] if is_classifier or not name.startswith("pooler."))
    if missing:
        names = ", ".join(missing[:10])
        raise ValueError(f"{_NAME}: {folder} must hold the tensors of its config.json, got missing: {names}")
    return encoder_of(model.to(device), weights, packs_weights(device))
