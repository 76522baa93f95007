"""Memory-mapped files: MappedFile, and SafetensorsFolder, the tensors of a model folder by name."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._core.dtypes import SAFETENSORS_DTYPES
from .method import NAME
from .weight import TensorInfo

_DTYPES = SAFETENSORS_DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
_PAGE = mmap.PAGESIZE


class Source(Protocol):
    """The tensors of one kind of file."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> Tensor:
        """Return a tensor in the file's memory, which must not be written to."""

    def release(self, name: str) -> None:
        """Drop the tensor's pages from memory; a later access reads them again."""

    def close(self) -> None: ...


class Renamed:
    """A Source whose tensors have other names.

    Args:
        source: It.
        names: The new names, by the old ones; each is of one tensor.
    """

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self._source, self._old = source, {new: old for old, new in names.items()}
        self.tensors = {names[old]: info for old, info in source.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._source.read(self._old[name])

    def release(self, name: str) -> None:
        self._source.release(self._old[name])

    def close(self) -> None:
        self._source.close()


class MappedFile:
    """A memory-mapped file."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            # A private, writable map, because torch warns of read-only ones.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.size = len(self._map)

    def tensor(self, begin: int, info: TensorInfo) -> Tensor:
        count = math.prod(info.shape)
        if not count:
            return torch.empty(info.shape, dtype=info.dtype)
        if begin % info.dtype.itemsize == 0:
            return torch.frombuffer(self._map, dtype=info.dtype, count=count, offset=begin).view(info.shape)
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=count * info.dtype.itemsize, offset=begin)
        return data.clone().view(info.dtype).view(info.shape)

    def release(self, begin: int, size: int) -> None:
        first, end = -(-begin // _PAGE) * _PAGE, (begin + size) // _PAGE * _PAGE
        if end > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file: bytes `begin` to `end` of the file, exclusive."""

    info: TensorInfo
    begin: int
    end: int


def read_header(path: Path, where: str = NAME) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, in the order of the file; the file's size is checked against them.

    Args:
        path: The file.
        where: The caller, which errors begin with.

    Raises:
        ValueError: For a file that is truncated, corrupt or missing, or has a dtype that torch does not have.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt"):
            pass  # the header is checked
        with open(path, "rb") as raw:
            size = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(size))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{where}: {path} must be a whole safetensors file, got: {error}") from error
    header.pop("__metadata__", None)
    stored = {}
    for name, entry in sorted(header.items(), key=lambda one: one[1]["data_offsets"]):
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{where}: {name} in {path} must be of a dtype of torch, got {entry['dtype']}")
        begin, end = entry["data_offsets"]
        stored[name] = StoredTensor(
            TensorInfo(_DTYPES[entry["dtype"]], tuple(entry["shape"])), 8 + size + begin, 8 + size + end
        )
    return stored


class SafetensorsFolder:
    """The safetensors files of a folder.

    Args:
        files: Shards, or the one file.
        where: The caller, which errors begin with.

    Raises:
        ValueError: For a file that is truncated or has a dtype that torch does not have.
    """

    def __init__(self, files: list[Path], where: str = NAME) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, tuple[MappedFile, int, int]] = {}
        for path in files:
            self._add(path, where)

    def _add(self, path: Path, where: str) -> None:
        stored = read_header(path, where)
        try:
            file = MappedFile(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{where}: {path} must be a whole safetensors file, got: {error}") from error
        for name, (info, begin, end) in stored.items():
            self.tensors[name] = info
            self._places[name] = file, begin, end - begin

    def read(self, name: str) -> Tensor:
        file, begin, _ = self._places[name]
        return file.tensor(begin, self.tensors[name])

    def release(self, name: str) -> None:
        file, begin, size = self._places[name]
        file.release(begin, size)

    def close(self) -> None:
        self._places.clear()


def read_tensors(path: Path, where: str = NAME) -> Iterator[tuple[str, Tensor]]:
    """Yield names and copies of the tensors of a safetensors file; errors as read_header."""
    file = SafetensorsFolder([path], where)
    for name in file.tensors:
        yield name, file.read(name).clone()
        file.release(name)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Views are copied, because the format has none."""
    from safetensors.torch import save_file

    whole = {}
    for name, tensor in tensors.items():
        is_view = not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.nbytes
        whole[name] = tensor.clone(memory_format=torch.contiguous_format) if is_view else tensor
    save_file(whole, path, metadata={"format": "pt"})  # transformers requires the metadata


def files_of(folder: Path, where: str = NAME) -> list[Path]:
    """Return the safetensors files of a model folder, by its index if it has one.

    Args:
        folder: The folder.
        where: The caller, which errors begin with.

    Raises:
        FileNotFoundError: If there is none, or one that the index names is missing.
        ValueError: If the index is not readable.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_object(index, where).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{where}: {index} must have a weight_map of tensors to files, got {type(names).__name__}")
        for name in names.values():
            if not isinstance(name, str) or name in ("", "..") or name != Path(name).name:
                raise ValueError(f"{where}: {index} must name files of its folder, got {name!r}")
        files = [folder / name for name in sorted(set(names.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise FileNotFoundError(f"{where}: {folder} must hold the files of its index, {', '.join(missing)} missing")
        return files
    files = [folder / "model.safetensors"] if (folder / "model.safetensors").is_file() else []
    files = files or sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{where}: a model folder must hold safetensors files, got {folder}, which has none")
    return files


_SPECIAL = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _decoded(value: dict[str, Any]) -> Any:
    """Return the number that an object of transformers' configs stands for, {"__float__": "Infinity"}; others as is."""
    name = value.get("__float__") if len(value) == 1 else None
    return _SPECIAL.get(name, value) if isinstance(name, str) else value


def read_object(path: Path, where: str = NAME) -> dict[str, Any]:
    """Return the object in a JSON file; errors begin with the caller, `where`, and name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{where}: a model folder must have a {path.name}, got {path.parent}, which has none")
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_decoded)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {path} must be JSON, got: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {path} must hold a JSON object, got {type(value).__name__}")
    return value
