"""Reading a model folder's safetensors into a model that is there already, tensor by tensor, from a memory map.

No more than one tensor in full precision is held at a time. What does not fit is named in one error before any is read.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .config import read_json

_NAME = "torch_infini.models.load_checkpoint"
_SHOWN = 10  # tensors of each kind that an error names


class Slot(NamedTuple):
    """A place of the model that a tensor of a checkpoint belongs to.

    Attributes:
        shape: Of the tensor.
        load: Takes it, in any floating dtype.
        read: Gives it back: a view of a dense parameter, what the integers stand for of a quantised one.
    """

    shape: tuple[int, ...]
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
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        opened = []
        for file in checkpoint_files(Path(folder)):
            try:
                opened.append(stack.enter_context(safe_open(file, framework="pt")))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{_NAME}: {file} must be a whole safetensors file, got: {error}") from error
        found = {name: file for file in opened for name in file.keys()}  # noqa: SIM118
        _check(Path(folder), found, slots, optional)
        tensors = ((name, file.get_tensor(name)) for name, file in found.items() if name in slots)
        for name, tensor in _shown(tensors, len(slots), progress):
            slots[name].load(tensor)


def _check(
    folder: Path, found: Mapping[str, object], slots: Mapping[str, Slot], optional: Callable[[str], bool]
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
        part = found[name].get_slice(name)  # type: ignore[attr-defined]
        if tuple(part.get_shape()) != slot.shape:
            shapes.append(f"{name} must have shape {list(slot.shape)}, got {part.get_shape()}")
        elif part.get_dtype() not in ("F32", "F16", "BF16", "F64"):
            shapes.append(f"{name} must be of a floating dtype, got {part.get_dtype()}")
    if shapes:
        more = f" and {len(shapes) - _SHOWN} more" if len(shapes) > _SHOWN else ""
        wrong.append("; ".join(shapes[:_SHOWN]) + more)
    if wrong:
        raise ValueError(f"{_NAME}: the tensors in {folder} must be those of its config.json, got " + "; ".join(wrong))


def _shown(tensors: Iterator[tuple[str, Tensor]], count: int, progress: bool | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors as they come; on stderr how many of them came, and how fast."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield from tensors
        return
    start, read = time.perf_counter(), 0
    for i, (name, tensor) in enumerate(tensors, 1):
        yield name, tensor
        read += tensor.numel() * tensor.element_size()
        speed = read / 1e9 / (time.perf_counter() - start)
        bar = "#" * (30 * i // count)
        print(f"\rloading [{bar:<30}] {read / 1e9:6.2f} GB, {speed:5.2f} GB/s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def floating(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype that the kernels serve, by itself or by name; ValueError for another."""
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None) or dtype  # type: ignore[assignment]
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"torch_infini.models: dtype must be float32, bfloat16 or float16, got {str(dtype).removeprefix('torch.')}"
        )
    return dtype  # type: ignore[return-value]
