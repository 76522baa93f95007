"""Read a model folder's safetensors into an existing model, in parts, several at a time.

Parts are converted, packed or quantized while they are in the CPU's cache: no tensor is held in full precision beside
the model's own. Tensors that do not fit are named in one error before any is read.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.devices import on_cpu
from .._core.progress import finish, track
from ..checkpoints import (
    StoredLayer,
    TensorInfo,
    Wanted,
    check_layers,
    check_tensors,
    files_of,
    read_header,
    read_object,
    saved_layers,
)
from ..weights import respelled

_NAME = "torch_infini.models.load_checkpoint"
# Bytes that a thread reads at a time: several of the large pages that reading allocates.
_PIECE = 8 << 20
# Bytes of tensors that are converted at a time: they stay in the CPU's cache, and are too few for an op to start
# threads (csrc/infiniop/quantize/quantize.h).
_PART = 1 << 20
_PREFIX, _WITHOUT_HEAD = "model.", ("embed_tokens.", "layers.", "norm.")
_COMPARED_BYTES = 64  # first bytes of each tensor, which ranks compare
_MAX_READERS = 8  # not tuned: measured only with two cores


class Shard(NamedTuple):
    """A part of a tensor: of its first dimension (rows), and of its second one (columns) if it has one."""

    first_row: int
    rows: int
    first_column: int = 0
    columns: int | None = None


class Slot(NamedTuple):
    """The destination in the model of a checkpoint's tensor, or of a part of it.

    Attributes:
        shape: The tensor's shape; at least one dimension.
        place: Contiguous memory that tensors of its dtype are read into directly; None: `load` converts or moves them.
        load: Takes some of the tensor's rows (the first dimension), on the CPU or the model's device, in any floating
            dtype, and the index of the first row. Threads may call it concurrently for different rows.
        read: Returns the tensor: a view of a dense parameter, otherwise a copy; integers are dequantized.
        part: The rows and columns of this rank's shard: only these are read, and `place`, `load` and `read` refer to
            them. None: all.
        dtype: The dtype of integers that are loaded as stored; None: the tensor has a floating dtype.
    """

    shape: tuple[int, ...]
    place: Tensor | None
    load: Callable[[Tensor, int], None]
    read: Callable[[], Tensor]
    part: Shard | None = None
    dtype: torch.dtype | None = None

    @property
    def first_row(self) -> int:
        return 0 if self.part is None else self.part.first_row

    @property
    def rows(self) -> int:
        return self.shape[0] if self.part is None else self.part.rows

    def cut(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        if self.part is None:
            return tensor
        first, rows, column, columns = self.part
        tensor = tensor[first : first + rows]
        return tensor if columns is None else tensor[:, column : column + columns]


def digest_of(folder: str | Path) -> bytes:
    """Return a 32-byte digest of a model folder's config, its files' headers and the beginning of every tensor.

    For a GGUF file: of its size and first 8 MiB.
    """
    if Path(folder).is_file():  # GGUF: the metadata, and possibly the first weights
        with open(folder, "rb") as file:
            return hashlib.sha256(f"{os.path.getsize(folder)}".encode() + file.read(_PIECE)).digest()
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    with ExitStack() as stack:
        for path in files_of(Path(folder), _NAME):
            _File(path, stack).add_to(digest)
    return digest.digest()


def check_sizes(
    folder: str | Path,
    layers: int,
    shapes: Callable[[], Mapping[str, tuple[int, ...]]],
    optional: Callable[[str], bool] = lambda name: False,
    integers: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Compare the sizes in config.json with the files' headers, before memory is allocated for a model.

    Args:
        folder: As load_checkpoint.
        layers: The model's number of layers; more than there are tensors raises before shapes() is called.
        shapes: Returns the shape of each tensor by name.
        optional: As load_checkpoint.
        integers: The dtypes of integer tensors by name.

    Raises:
        FileNotFoundError, ValueError: As load_checkpoint.
    """
    with ExitStack() as stack:
        found = _infos([_File(path, stack) for path in files_of(Path(folder), _NAME)])
        check_layers(_NAME, Path(folder), found, layers)
        dtypes = integers or {}
        wanted = {name: Wanted(tuple(shape), dtypes.get(name)) for name, shape in shapes().items()}
        check_tensors(_NAME, Path(folder), found, wanted, optional)


def load_checkpoint(
    folder: str | Path,
    slots: Mapping[str, Slot],
    optional: Callable[[str], bool] = lambda name: False,
    progress: bool | None = None,
) -> None:
    """Fill a model's slots from a folder.

    As many threads as torch uses read, convert and quantize: 2 to 8, at most one per core.

    Args:
        folder: Has model.safetensors, several *.safetensors, or shards and their index.
        slots: By the names of the checkpoint's tensors.
        optional: Returns whether a tensor without a slot may be in the checkpoint.
        progress: Whether to show a bar on stderr; None: if stderr is a terminal.

    Raises:
        FileNotFoundError: If files are missing.
        ValueError: If a file is corrupt or truncated, or tensors are missing, surplus, of another shape or of integers;
            all are named, and nothing is loaded.
    """
    with ExitStack() as stack:
        opened = [_File(path, stack) for path in files_of(Path(folder), _NAME)]
        wanted = {name: Wanted(tuple(slot.shape), slot.dtype) for name, slot in slots.items()}
        check_tensors(_NAME, Path(folder), _infos(opened), wanted, optional)
        found = {name: file for file in opened for name in file.stored}
        pieces = [piece for name, file in found.items() if name in slots for piece in file.pieces(name, slots[name])]
        inference = torch.is_inference_mode_enabled()  # threads of the pool use the mode of this thread

        def load(piece: _Piece) -> None:
            with torch.inference_mode(inference):
                piece.load()

        with ThreadPoolExecutor(_readers(), "torch_infini loads") as pool:
            # An error cancels the pieces that have not begun.
            sizes = [piece.bytes for piece in pieces]
            finish(track(pool.map(load, pieces), "loading", sizes, progress, "B"))


def _readers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, max(torch.get_num_threads(), 2), _MAX_READERS)


class _File:
    """An open safetensors file whose header fits its size."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        stored = read_header(path, _NAME)  # in the file's order, which a disk reads fastest
        # Models that were saved without their head, as those of sentence-transformers are, lack the prefix.
        prefix = _PREFIX if stored and all(name.startswith(_WITHOUT_HEAD) for name in stored) else ""
        self.stored = {prefix + name: tensor for name, tensor in stored.items()}
        self._file = stack.enter_context(open(path, "rb", buffering=0))  # noqa: SIM115

    def add_to(self, digest: hashlib._Hash) -> None:
        for name, (info, begin, end) in self.stored.items():
            digest.update(repr((name, info, begin, end)).encode())
            digest.update(os.pread(self._file.fileno(), min(end - begin, _COMPARED_BYTES), begin))

    def pieces(self, name: str, slot: Slot) -> Iterator[_Piece]:
        """Yield a slot's rows of a tensor, in parts that threads can load concurrently."""
        info, begin, end = self.stored[name]
        dtype, whole = info.dtype, slot.shape
        part = slot.part or Shard(0, whole[0])
        pitch = (end - begin) // max(whole[0], 1)
        shape, row_bytes = whole[1:], pitch
        if part.columns is not None:
            shape = (part.columns, *whole[2:])
            row_bytes = math.prod(shape) * dtype.itemsize
        begin += part.first_row * pitch + part.first_column * math.prod(whole[2:]) * dtype.itemsize
        step = _rows_in(_PIECE, row_bytes)
        for first in range(0, part.rows, step):
            count = min(step, part.rows - first)
            yield _Piece(self, slot, dtype, shape, begin + first * pitch, pitch, row_bytes, first, count)

    def read(self, to: int, size: int, offset: int) -> None:
        """Read bytes of the file to an address. Copying from an mmap is a fifth slower, because of page faults."""
        memory = memoryview((ctypes.c_char * size).from_address(to)).cast("B")
        while memory:
            count = os.preadv(self._file.fileno(), [memory], offset)
            if not count:
                raise ValueError(f"{_NAME}: {self._path} must not change while it is read, got the end of it")
            memory, offset = memory[count:], offset + count


def _infos(files: Iterable[_File]) -> dict[str, TensorInfo]:
    return {name: stored.info for file in files for name, stored in file.stored.items()}


class _Piece(NamedTuple):
    """Rows of a tensor in a file, and their slot: row_bytes of every pitch bytes are read."""

    file: _File
    slot: Slot
    dtype: torch.dtype
    shape: tuple[int, ...]  # of a row
    offset: int
    pitch: int
    row_bytes: int
    first: int
    rows: int

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    def load(self) -> None:
        """Read the rows into the slot's memory, or pass them to its `load` if they must be converted."""
        place = self.slot.place
        if place is not None and on_cpu(place) and place.dtype == self.dtype:
            self._read(place.data_ptr() + self.first * self.row_bytes, 0, self.rows)
            return
        step = _rows_in(_PART, self.row_bytes)
        rows = torch.empty(min(step, self.rows), *self.shape, dtype=self.dtype, device="cpu")
        for done in range(0, self.rows, step):
            some = rows[: self.rows - done]
            self._read(some.data_ptr(), done, len(some))
            self.slot.load(some, self.first + done)

    def _read(self, to: int, first: int, rows: int) -> None:
        offset = self.offset + first * self.pitch
        if self.pitch == self.row_bytes:
            self.file.read(to, rows * self.row_bytes, offset)
            return
        for row in range(rows):
            self.file.read(to + row * self.row_bytes, self.row_bytes, offset + row * self.pitch)


def _rows_in(size: int, row_bytes: int) -> int:
    return max(size // max(row_bytes, 1), 1)


def stored_layers(folder: str | Path) -> dict[str, StoredLayer]:
    """Return the layers that torch_infini.save_patched stored as integers, by name; none for other folders.

    Raises:
        ValueError: If the entry in config.json is not one of save_patched.
    """
    entry = read_object(Path(folder) / "config.json", _NAME).get("quantization_config")
    if not isinstance(entry, dict) or entry.get("quant_method") != "torch_infini":
        return {}
    return saved_layers(respelled(entry).get("quantized"), f"{folder}/config.json", _NAME)
