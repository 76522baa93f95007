"""GGUF files: metadata converted to the values of a config.json, and tensors by the names of transformers.

The package gguf reads the metadata; tensors are memory-mapped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .architecture import FREQUENCIES, LONG, SHORT, Architecture, Metadata
from .architectures import ARCHITECTURES
from .blocks import KINDS, Blocks, BlocksOfExperts, interleaved
from .description import QuantizedLayer, checked_layer, found_experts
from .experts import StoredExperts
from .files import MappedFile
from .method import NAME
from .weight import TensorInfo

_DENSE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COMPUTED = (FREQUENCIES, LONG, SHORT)  # in the config instead
_ALWAYS_FLOAT32 = ("gate.weight", "router.weight", "_bias", "conv.weight")  # matrices of small ones
_PART = ".part"  # of the name of a part of a tensor, followed by the part's index


class _Stored(NamedTuple):
    """A tensor of the file: its bytes, dtype and shape, and its kind of block or None."""

    begin: int
    size: int
    info: TensorInfo
    kind: str | None


class GGUFFile:
    """The tensors of a GGUF file.

    Args:
        path: The file.
        infos: The package's descriptions of the tensors.
        architecture: The file's.
        heads: Heads of q and of k, if the file has their rows interleaved; else None.

    Attributes:
        tensors: By the names of transformers; a tensor that is stored in parts is one, unless it is in `experts`, whose
            parts are here.
        kinds: The kinds of tensors in blocks.
        experts: Experts in blocks of one kind, by name.

    Raises:
        ValueError: For a tensor that is not known or ends beyond the file.
        NotImplementedError: For a type that is not supported.
    """

    def __init__(self, path: Path, infos: Any, architecture: Architecture, heads: dict[str, int] | None) -> None:
        self._file = MappedFile(path)
        self._path, self._architecture, self._heads = path, architecture, heads or {}
        self.tensors: dict[str, TensorInfo] = {}
        self.kinds: dict[str, str] = {}
        self._stored: dict[str, _Stored] = {}
        self._parts: dict[str, list[str]] = {}  # names in _stored, of tensors in parts
        for info in infos:
            if info.name in _COMPUTED:
                continue
            part = architecture.part_of(info.name)
            name = architecture.name_of(info.name) if part is None else f"{part[0]}{_PART}{part[1]}"
            if name is None:
                raise ValueError(f"{NAME}: tensors in {path} must be those of a {architecture.name}, got {info.name}")
            stored = self._stored[name] = self._stored_as(info)
            if part is not None:
                self._parts.setdefault(part[0], []).append(name)
                continue
            added = next((dim for end, dim in architecture.added.items() if name.endswith(end)), None)
            self.tensors[name] = stored.info
            if added is not None and stored.kind is None:
                shape = stored.info.shape
                self.tensors[name] = TensorInfo(stored.info.dtype, (*shape[:added], 1, *shape[added:]))
            if stored.kind is not None:
                self.kinds[name] = stored.kind
        self.experts = self._joined()

    def _stored_as(self, info: Any) -> _Stored:
        kind, shape = info.tensor_type.name, tuple(int(size) for size in reversed(info.shape))
        begin, size = int(info.data_offset), int(info.n_bytes)
        if begin + size > self._file.size:
            raise ValueError(
                f"{NAME}: {self._path} must hold all of {info.name}, {begin + size} bytes, got {self._file.size} bytes"
            )
        if kind in KINDS:
            *rows, columns = shape
            row = columns // KINDS[kind].elements * KINDS[kind].bytes
            return _Stored(begin, size, TensorInfo(torch.uint8, (*rows, row)), kind)
        if kind in _DENSE:
            return _Stored(begin, size, TensorInfo(_DENSE[kind], shape), None)
        raise NotImplementedError(
            f"{NAME}: {info.name} in {self._path} must be one of {', '.join([*KINDS, *_DENSE])}, got {kind}"
        )

    def _joined(self) -> dict[str, StoredExperts]:
        """Add the tensors that are stored in parts; return those of which all parts are in blocks of one kind."""
        found: dict[str, StoredExperts] = {}
        for whole, names in self._parts.items():
            count = len(next(parts for end, parts in self._architecture.parts.items() if whole.endswith(f".{end}")))
            names.sort()
            if len(names) != count:
                raise ValueError(f"{NAME}: {whole} in {self._path} must have {count} parts, got {len(names)}")
            stored = [self._stored[name] for name in names]
            shapes = {self._values_shape(one) for one in stored}
            if len(shapes) != 1 or not 2 <= len(first := shapes.pop()) <= 3:
                raise ValueError(
                    f"{NAME}: the parts of {whole} in {self._path} must have one shape, got "
                    f"{', '.join(str(list(self._values_shape(one))) for one in stored)}"
                )
            kinds = {one.kind for one in stored}
            if len(first) == 3 and len(kinds) == 1 and None not in kinds:
                (kind,) = kinds
                parts = tuple(f"{_PART}{i}" for i in range(count))
                one = self._architecture
                format = BlocksOfExperts(str(kind), parts, one.interleaved_parts, one.transposed_experts)
                infos = dict(zip(names, (one.info for one in stored), strict=True))
                self.tensors |= infos
                found |= found_experts(format, infos)
                continue
            shape = (first[0], count * first[1], *first[2:])
            if len(first) == 3 and self._architecture.transposed_experts:
                shape = shape[0], shape[2], shape[1]
            dtypes = {one.info.dtype for one in stored}
            dtype = torch.float32 if len(dtypes) > 1 or torch.uint8 in dtypes else dtypes.pop()
            self.tensors[whole] = TensorInfo(dtype, shape)
        return found

    def _values_shape(self, stored: _Stored) -> tuple[int, ...]:
        *rows, last = stored.info.shape
        return (*rows, last if stored.kind is None else last // KINDS[stored.kind].bytes * KINDS[stored.kind].elements)

    def read(self, name: str) -> Tensor:
        if name in self._parts:
            return self._whole(name)
        stored = self._stored[name]
        tensor = self._file.tensor(stored.begin, stored.info)
        if stored.kind is not None:
            return tensor  # Blocks reorders rows itself
        head = self.head(name)
        if head:
            return tensor[interleaved(len(tensor), head)]
        if self._architecture.adds_one and tensor.dim() == 1 and name.endswith("norm.weight"):
            return tensor.float() - 1
        return tensor if _PART in name else tensor.view(self.tensors[name].shape)

    def _whole(self, name: str) -> Tensor:
        """Join a tensor that is stored in parts, of which not all are in blocks of one kind."""
        parts = []
        for part in self._parts[name]:
            tensor, kind = self.read(part), self._stored[part].kind
            if kind is not None:
                blocks = tensor.unflatten(-1, (-1, KINDS[kind].bytes))
                tensor = torch.stack([KINDS[kind].dequantize(own) for own in blocks])
            parts.append(tensor)
        whole = torch.stack(parts, 2).flatten(1, 2) if self._architecture.interleaved_parts else torch.cat(parts, 1)
        transposed = self._architecture.transposed_experts and whole.dim() == 3
        return (whole.transpose(1, 2) if transposed else whole).to(self.tensors[name].dtype)

    def head(self, name: str) -> int:
        """Return the rows of a head if the file has them interleaved; 0 for other tensors."""
        heads = self._heads.get(".".join(name.split(".")[-2:-1]))
        return 0 if heads is None else self.tensors[name].shape[0] // heads

    def release(self, name: str) -> None:
        for part in self._parts.get(name, [name]):
            self._file.release(self._stored[part].begin, self._stored[part].size)

    def close(self) -> None:
        self._stored.clear()


def open_reader(path: Path) -> Any:
    """Return the package's reader of a file; ImportError without the package, ValueError for a truncated file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"{NAME}: GGUF files need the package gguf: run `pip install gguf`, got {path}") from error
    try:
        return GGUFReader(path)
    except Exception as error:  # numpy's, if the file is truncated
        raise not_whole(path, error) from error


def not_whole(path: Path, error: Exception) -> ValueError:
    cause = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"{NAME}: {path} must be a whole GGUF file, got: {cause}")


def has_tokenizer(path: Path) -> bool:
    """Return whether a GGUF file holds a tokenizer; errors as open_reader."""
    return "tokenizer.ggml.tokens" in open_reader(path).fields


class OpenGGUF(NamedTuple):
    """An open file: the values of its config, its tensors, and its quantized layers and experts.

    The layers include the embedding if it is in blocks.
    """

    config: dict[str, Any]
    file: GGUFFile
    layers: dict[str, QuantizedLayer]
    experts: dict[str, StoredExperts]


def _special_tokens(ids: dict[str, int]) -> dict[str, Any]:
    """Return the config's entries; null, and not a default of the model's type, for tokens that the file lacks."""
    # The end of a turn (eot) and of a message (eom) end a text too, as in llama.cpp.
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if name in ids))
    eos = None if not ends else ends[0] if len(ends) == 1 else ends
    return {"bos_token_id": ids.get("bos"), "eos_token_id": eos, "pad_token_id": ids.get("padding")}


def open_gguf(path: Path) -> OpenGGUF:
    """Open a GGUF file.

    Raises:
        ImportError: Without the package gguf.
        ValueError, NotImplementedError: As open_checkpoint.
    """
    reader = open_reader(path)
    try:
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        names = ("bos", "eos", "eot", "eom", "padding")
        ids = {name: reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in names}
        tokens = {name: int(field.contents()) for name, field in ids.items() if field is not None}
    except Exception as error:  # numpy's, if the file is truncated
        raise not_whole(path, error) from error
    metadata = Metadata(path, fields, {info.name: info for info in reader.tensors})
    name = metadata.architecture
    if name not in ARCHITECTURES:
        raise ValueError(
            f"{NAME}: general.architecture in {path} must be one of {', '.join(ARCHITECTURES)}, got {name!r}"
        )
    architecture = ARCHITECTURES[name]
    config = {**architecture.config(metadata), **_special_tokens(tokens)}
    heads = None
    if architecture.interleaved:
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    file = GGUFFile(path, reader.tensors, architecture, heads)
    # A file does not name a dtype: use that of its unquantized matrices.
    infos = [info for name, info in file.tensors.items() if len(info.shape) == 2 and not name.endswith(_ALWAYS_FLOAT32)]
    dtype = next((info.dtype for info in infos if info.dtype.is_floating_point), torch.bfloat16)
    config["dtype"] = str(dtype).removeprefix("torch.")
    layers = {}
    for name, kind in file.kinds.items():
        layer, _, last = name.rpartition(".")
        if last != "weight" or len(file.tensors[name].shape) != 2:
            raise ValueError(f"{NAME}: {name} in {path} must not be quantized, got {kind}")
        layers[layer] = checked_layer(layer, Blocks(kind, file.head(name)), {"weight": file.tensors[name]})
    return OpenGGUF(config, file, layers, file.experts)
