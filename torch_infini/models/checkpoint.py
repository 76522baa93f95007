"""Reading a model folder's safetensors into a model that is there already, tensor by tensor.

No more than one tensor in full precision is held at a time. What does not fit is named in one error before any is read.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .config import read_json

_NAME = "torch_infini.models.load_checkpoint"
# As safetensors calls what can be loaded.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHOWN = 10  # tensors of each kind that an error names


class Slot(NamedTuple):
    """A place of the model that a tensor of a checkpoint belongs to.

    Attributes:
        shape: Of the tensor.
        place: Where its bytes belong if they are of that dtype: contiguous; None: nowhere, they are changed.
        load: Takes it, in any floating dtype.
        read: Gives it back: a view of a dense parameter, what the integers stand for of a quantised one.
    """

    shape: tuple[int, ...]
    place: Tensor | None
    load: Callable[[Tensor], None]
    read: Callable[[], Tensor]


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by its index where there is one.

    Raises:
        FileNotFoundError: If there is none, or one that the index names is missing.
        ValueError: If the index is not readable.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ValueError(f"{_NAME}: {index} must have a weight_map of tensors to files, got {type(names).__name__}")
        files = [folder / name for name in sorted(set(names.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise FileNotFoundError(f"{_NAME}: {folder} must hold the files of its index, {', '.join(missing)} missing")
        return files
    files = [folder / "model.safetensors"] if (folder / "model.safetensors").is_file() else []
    files = files or sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{_NAME}: a model folder must hold safetensors files, got {folder}, which has none")
    return files


def load_checkpoint(
    folder: str | Path,
    slots: Mapping[str, Slot],
    optional: Callable[[str], bool] = lambda name: False,
    progress: bool | None = None,
) -> None:
    """Fill a model's slots from a folder.

    Args:
        folder: With model.safetensors, several *.safetensors, or shards and their index.
        slots: By the names of the checkpoint's tensors.
        optional: Whether a tensor that has no slot may be in the checkpoint all the same.
        progress: Whether a line with GB/s goes to stderr; None: if that is a terminal.

    Raises:
        FileNotFoundError: If files are missing.
        ValueError: If a file is corrupt or cut off, or tensors are missing, too many, of another shape or of integers;
            all are named, and nothing is loaded.
    """
    with ExitStack() as stack:
        opened = [_File(path, stack) for path in checkpoint_files(Path(folder))]
        found = {name: file for file in opened for name in file.names}
        _check(Path(folder), found, slots, optional)
        for name in _shown([name for name in found if name in slots], found, progress):
            found[name].load(name, slots[name])


class _File:
    """An open safetensors file whose header fits its size."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        from safetensors import SafetensorError, safe_open

        self._path = path
        try:
            self._map = stack.enter_context(safe_open(path, framework="pt"))
            self._file = stack.enter_context(open(path, "rb", buffering=0))  # noqa: SIM115
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{_NAME}: {path} must be a whole safetensors file, got: {error}") from error
        size = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(size))
        header.pop("__metadata__", None)
        self.names = list(header)
        self._header, self._data = header, 8 + size

    def shape(self, name: str) -> list[int]:
        return self._header[name]["shape"]

    def dtype(self, name: str) -> str:
        return self._header[name]["dtype"]

    def bytes(self, name: str) -> int:
        begin, end = self._header[name]["data_offsets"]
        return end - begin

    def load(self, name: str, slot: Slot) -> None:
        """Read a tensor to where it belongs, or hand it over if it must be converted."""
        place = slot.place
        if place is None or not place.is_cpu or DTYPES[self.dtype(name)] != place.dtype:
            slot.load(self._map.get_tensor(name))
            return
        # Copying from the map would look up every page of it: a fifth of the time.
        memory = memoryview((ctypes.c_char * place.nbytes).from_address(place.data_ptr())).cast("B")
        self._file.seek(self._data + self._header[name]["data_offsets"][0])
        while memory:
            count = self._file.readinto(memory)
            if not count:
                raise ValueError(f"{_NAME}: {self._path} must not change while it is read, got the end of it")
            memory = memory[count:]


def _check(
    folder: Path, found: Mapping[str, _File], slots: Mapping[str, Slot], optional: Callable[[str], bool]
) -> None:
    wrong = []
    for kind, names in (
        ("missing", [name for name in slots if name not in found]),
        ("surplus", [name for name in found if name not in slots and not optional(name)]),
    ):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            wrong.append(f"{kind}: {', '.join(names[:_SHOWN])}{more}")
    shapes = []
    for name, slot in slots.items():
        if name not in found:
            continue
        shape, dtype = found[name].shape(name), found[name].dtype(name)
        if tuple(shape) != slot.shape:
            shapes.append(f"{name} must have shape {list(slot.shape)}, got {shape}")
        elif dtype not in DTYPES:
            shapes.append(f"{name} must be of a floating dtype, got {dtype}")
    if shapes:
        more = f" and {len(shapes) - _SHOWN} more" if len(shapes) > _SHOWN else ""
        wrong.append("; ".join(shapes[:_SHOWN]) + more)
    if wrong:
        raise ValueError(f"{_NAME}: the tensors in {folder} must be those of its config.json, got " + "; ".join(wrong))


def _shown(names: Sequence[str], found: Mapping[str, _File], progress: bool | None) -> Iterator[str]:
    """The names, as whoever loads them comes for the next; on stderr how many were loaded, and how fast."""
    shown = sys.stderr.isatty() if progress is None else progress
    start, read = time.perf_counter(), 0
    for i, name in enumerate(names, 1):
        yield name
        read += found[name].bytes(name)
        if shown:
            speed = read / 1e9 / (time.perf_counter() - start)
            bar = "#" * (30 * i // len(names))
            end = "\n" if i == len(names) else ""
            line = f"\rloading [{bar:<30}] {read / 1e9:6.2f} GB, {speed:5.2f} GB/s"
            print(line, end=end, file=sys.stderr, flush=True)


def floating(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype that the kernels serve, by itself or by name; ValueError for another."""
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None) or dtype  # type: ignore[assignment]
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"torch_infini.models: dtype must be float32, bfloat16 or float16, got {str(dtype).removeprefix('torch.')}"
        )
    return dtype  # type: ignore[return-value]
