"""GGUF files: metadata converted to the values of a config.json, and tensors by the names of transformers.

The package gguf reads the metadata; tensors are memory-mapped.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .architecture import FREQUENCIES, LONG, SHORT, Architecture, Metadata
from .architectures import ARCHITECTURES
from .blocks import KINDS, Blocks, BlocksOfExperts
from .description import QuantizedLayer, checked_layer, found_experts
from .experts import StoredExperts
from .files import MappedFile
from .method import NAME
from .order import Order
from .weight import TensorInfo

_DENSE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COMPUTED = (FREQUENCIES, LONG, SHORT)  # in the config instead
# Small matrices, which files have in float32 or float16 whatever the others are.
_IN_FULL_PRECISION = (
    *("gate.weight", "router.weight", "router.proj.weight", "_bias", "conv.weight", "_coefs.weight"),
    *("in_proj_a.weight", "in_proj_b.weight", "per_layer_input_gate.weight", "per_layer_projection.weight"),
)
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
        metadata: The fields and tensors of the file.
        architecture: The file's.

    Attributes:
        tensors: By the names of transformers; a tensor that is stored in parts is one, unless it is in `experts`, whose
            parts are here. Blocks behind the decoder's layers are not.
        kinds: The kinds of tensors in blocks.
        experts: Experts in blocks of one kind, by name.
        joined: Layers whose rows are stored in several tensors in blocks of one kind.

    Raises:
        ValueError: For a tensor that is not known or ends beyond the file.
        NotImplementedError: For a type that is not supported.
    """

    def __init__(self, metadata: Metadata, architecture: Architecture) -> None:
        path = self._path = metadata.path
        self._file = MappedFile(path)
        self._metadata, self._architecture = metadata, architecture
        self.tensors: dict[str, TensorInfo] = {}
        self.kinds: dict[str, str] = {}
        self._stored: dict[str, _Stored] = {}
        self._parts: dict[str, list[str]] = {}  # names in _stored, of tensors in parts
        self._of_fields = architecture.from_fields(metadata)
        self.tensors |= {name: TensorInfo(one.dtype, tuple(one.shape)) for name, one in self._of_fields.items()}
        counts: dict[str, int] = {}
        for info in metadata.infos.values():
            if info.name in _COMPUTED or metadata.is_behind(info.name):
                continue
            if info.name in architecture.stacked:
                self._add_slices(architecture.stacked[info.name], info)
                continue
            part = architecture.part_of(info.name)
            name = architecture.name_of(info.name) if part is None else f"{part.whole}{_PART}{part.place}"
            if name is None:
                raise ValueError(f"{NAME}: tensors in {path} must be those of a {architecture.name}, got {info.name}")
            stored = self._stored_as(info)
            if part is not None:
                self._stored[name] = stored
                self._parts.setdefault(part.whole, []).append(name)
                counts[part.whole] = part.total
                continue
            self._add(name, stored)
        self.joined: dict[str, QuantizedLayer] = {}
        for whole, names in self._parts.items():
            names.sort()
            if len(names) != counts[whole]:
                raise ValueError(f"{NAME}: {whole} in {path} must have {counts[whole]} parts, got {len(names)}")
        self.experts = self._joined()

    def _add(self, name: str, stored: _Stored) -> None:
        """Add a tensor of the model that is stored as one."""
        self._stored[name] = stored
        self.tensors[name] = stored.info if stored.kind is not None else self._as_in_model(name, stored.info)
        if stored.kind is not None:
            self.kinds[name] = stored.kind

    def _add_slices(self, name: str, info: Any) -> None:
        """Add the matrices that are stored as one tensor; `name`: theirs, with {} for their number."""
        stored = self._stored_as(info)
        count, *shape = stored.info.shape
        if len(shape) != 2 or count < 1:
            raise ValueError(
                f"{NAME}: {info.name} in {self._path} must have 3 dimensions, got {list(stored.info.shape)}"
            )
        size = stored.size // count
        for i in range(count):
            matrix = TensorInfo(stored.info.dtype, tuple(shape))
            self._add(name.format(i), _Stored(stored.begin + i * size, size, matrix, stored.kind))

    def _as_in_model(self, name: str, info: TensorInfo) -> TensorInfo:
        """Return what a tensor in full precision is in the model."""
        shape = info.shape
        if name.endswith(self._architecture.flat):
            return TensorInfo(info.dtype, (math.prod(shape),))
        added = next((dim for end, dim in self._architecture.added.items() if name.endswith(end)), None)
        return info if added is None else TensorInfo(info.dtype, (*shape[:added], 1, *shape[added:]))

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
        one = self._architecture
        for whole, names in self._parts.items():
            joined = one.joined_as(whole)
            count = len(names)
            stored = [self._stored[name] for name in names]
            dtypes = {own.info.dtype for own in stored}
            dtype = torch.float32 if len(dtypes) > 1 or torch.uint8 in dtypes else dtypes.pop()
            if joined is not None:
                if joined.join is None and self._joins_blocks(whole, names):
                    continue
                parts = [torch.empty(self._values_shape(own), device="meta") for own in stored]
                try:
                    self.tensors[whole] = TensorInfo(dtype, tuple(joined.of(self._metadata, parts).shape))
                except (RuntimeError, IndexError) as error:
                    got = ", ".join(str(list(part.shape)) for part in parts)
                    raise ValueError(
                        f"{NAME}: the parts of {whole} in {self._path} must have the shapes that the fields of a "
                        f"{one.name} give, got {got}"
                    ) from error
                continue
            shapes = {self._values_shape(own) for own in stored}
            if len(shapes) != 1 or not 2 <= len(first := shapes.pop()) <= 3:
                raise ValueError(
                    f"{NAME}: the parts of {whole} in {self._path} must have one shape, got "
                    f"{', '.join(str(list(self._values_shape(own))) for own in stored)}"
                )
            kinds = {own.kind for own in stored}
            if len(first) == 3 and len(kinds) == 1 and None not in kinds:
                (kind,) = kinds
                lasts = tuple(f"{_PART}{i}" for i in range(count))
                format = BlocksOfExperts(str(kind), lasts, one.interleaved_parts, one.transposed_experts)
                infos = dict(zip(names, (own.info for own in stored), strict=True))
                self.tensors |= infos
                found |= found_experts(format, infos)
                continue
            shape = (first[0], count * first[1], *first[2:])
            if len(first) == 3 and one.transposed_experts:
                shape = shape[0], shape[2], shape[1]
            self.tensors[whole] = TensorInfo(dtype, shape)
        return found

    def _joins_blocks(self, whole: str, names: list[str]) -> bool:
        """Add a layer whose rows are in several tensors in blocks of one kind; return False for others."""
        stored = [self._stored[name] for name in names]
        kinds = {own.kind for own in stored}
        if len(kinds) != 1 or None in kinds or len({own.info.shape[1:] for own in stored}) != 1:
            return False
        infos = {name: own.info for name, own in zip(names, stored, strict=True)}
        layer, _, last = whole.rpartition(".")
        lasts = {f"{last}{_PART}{i}": info for i, info in enumerate(infos.values())}
        parts = tuple((name, info.shape[0]) for name, info in lasts.items())
        self.tensors |= infos
        self.joined[layer] = checked_layer(layer, Blocks(str(stored[0].kind), parts=parts), lasts)
        return True

    def _values_shape(self, stored: _Stored) -> tuple[int, ...]:
        *rows, last = stored.info.shape
        return (*rows, last if stored.kind is None else last // KINDS[stored.kind].bytes * KINDS[stored.kind].elements)

    def read(self, name: str) -> Tensor:
        if name in self._of_fields:
            return self._of_fields[name]
        if name in self._parts:
            return self._whole(name)
        stored = self._stored[name]
        tensor = self._file.tensor(stored.begin, stored.info)
        if stored.kind is not None or _PART in name:
            return tensor  # Blocks has the order of rows and columns
        rows, columns = self.orders(name)
        try:
            if rows is not None:
                tensor = tensor[rows.index(len(tensor))]
            if columns is not None:
                tensor = tensor[:, columns.index(tensor.shape[1])]
            return self._architecture.values(name, tensor).view(self.tensors[name].shape)
        except ValueError as error:
            raise ValueError(f"{NAME}: {name} in {self._path}: {error}") from error

    def _whole(self, name: str) -> Tensor:
        """Join a tensor that is stored in parts, of which not all are in blocks of one kind."""
        parts = []
        for part in self._parts[name]:
            tensor, kind = self.read(part), self._stored[part].kind
            if kind is not None:
                blocks = tensor.reshape(-1, *tensor.shape[-2:]).unflatten(-1, (-1, KINDS[kind].bytes))
                values = torch.stack([KINDS[kind].dequantize(own) for own in blocks])  # one of 3 dimensions at a time
                tensor = values.view(self._values_shape(self._stored[part]))
            parts.append(tensor)
        one, dtype = self._architecture, self.tensors[name].dtype
        if (joined := one.joined_as(name)) is not None:
            return joined.of(self._metadata, parts).to(dtype)
        whole = torch.stack(parts, 2).flatten(1, 2) if one.interleaved_parts else torch.cat(parts, 1)
        return (whole.transpose(1, 2) if one.transposed_experts and whole.dim() == 3 else whole).to(dtype)

    def orders(self, name: str) -> tuple[Order | None, Order | None]:
        """Return the orders of a tensor's rows and columns in the file; None: the model's."""
        stored, one = self._stored[name], self._architecture
        shape = self._values_shape(stored)
        columns = one.columns(self._metadata, name, shape[1]) if len(shape) == 2 else None
        return one.rows(self._metadata, name, shape[0]), columns

    def release(self, name: str) -> None:
        if name in self._of_fields:
            return
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
    file = GGUFFile(metadata, architecture)
    # A file does not name a dtype: use that of its unquantized matrices.
    infos = [
        info for name, info in file.tensors.items() if len(info.shape) == 2 and not name.endswith(_IN_FULL_PRECISION)
    ]
    dtype = next((info.dtype for info in infos if info.dtype.is_floating_point), torch.bfloat16)
    config["dtype"] = str(dtype).removeprefix("torch.")
    layers = dict(file.joined)
    for name, kind in file.kinds.items():
        layer, _, last = name.rpartition(".")
        if last != "weight" or len(file.tensors[name].shape) != 2:
            raise ValueError(f"{NAME}: {name} in {path} must not be quantized, got {kind}")
        layers[layer] = checked_layer(layer, Blocks(kind, *file.orders(name)), {"weight": file.tensors[name]})
    return OpenGGUF(config, file, layers, file.experts)
