"""open_checkpoint: config, tensors and quantized layers of a model folder, a GGUF file or a name on the hub.

Files are memory-mapped; a tensor's pages are dropped once its layer has been read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from .agreement import Wanted, check_tensors, is_derived
from .description import OURS, QuantizedLayer, experts_of, layers_of
from .experts import StoredExperts
from .files import Renamed, SafetensorsFolder, Source, files_of, read_object
from .formats import METHODS
from .gguf_file import open_gguf
from .hub import find
from .method import NAME
from .weight import LinearWeight, Target, TensorInfo

Activations = Literal["int8"]


class Checkpoint:
    """A checkpoint that is open for reading.

    Attributes:
        path: The folder or file.
        config: The values of config.json, or those converted from a GGUF file's metadata.
        tensors: Dtype and shape of every tensor, by the names of transformers.
        layers: The quantized linear layers by name; empty for dense checkpoints and those of save_patched.
        experts: The quantized experts of mixtures, by the names of the model's tensors.
        activations: "int8": x is quantized in every product with integers; None: only if the checkpoint says so.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        source: Source,
        layers: dict[str, QuantizedLayer],
        activations: Activations | None = None,
        experts: Mapping[str, StoredExperts] = MappingProxyType({}),
    ) -> None:
        self.path, self.config, self.layers, self.activations = path, config, layers, activations
        self.experts = experts
        self._source = source

    @property
    def is_quantized(self) -> bool:
        """Whether some of it is quantized by another library than this one."""
        return bool(self.layers or self.experts)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._source.tensors

    @property
    def dequantized(self) -> dict[str, TensorInfo]:
        """The tensors of the same model as a dense checkpoint: weights of quantized layers are float32 [n, k], those of
        experts [experts, k, n] or [experts, n, k], as the model's own.
        """
        parts = [*(one.names for one in self.layers.values()), *(one.names for one in self.experts.values())]
        stored = {tensor for names in parts for tensor in names.values()}
        whole = {f"{name}.weight": TensorInfo(torch.float32, (layer.n, layer.k)) for name, layer in self.layers.items()}
        for name, one in self.experts.items():
            rows = (one.k, one.n) if one.format.transposed else (one.n, one.k)
            whole[name] = TensorInfo(torch.float32, (one.experts, *rows))
        return {name: info for name, info in self.tensors.items() if name not in stored} | whole

    def rename(self, new_name: Callable[[str], str]) -> None:
        """Call tensors by other names, where the files have those of a model's class of another release.

        Args:
            new_name: Returns the name of a tensor by that in the file.

        Raises:
            ValueError: If two tensors would have one name.
        """
        names = {name: new_name(name) for name in self.tensors}
        if all(old == new for old, new in names.items()):
            return
        found: dict[str, str] = {}
        for old, new in names.items():
            if (other := found.setdefault(new, old)) != old:
                raise ValueError(f"{NAME}: tensors of {self.path} must have names of their own, got {other} and {old}")
        self._source = Renamed(self._source, names)
        layers = {}
        for layer, stored in self.layers.items():
            name = new_name(f"{layer}.weight").removesuffix(".weight")
            layers[name] = stored._replace(names={last: names[tensor] for last, tensor in stored.names.items()})
        self.layers = layers
        self.experts = {
            new_name(name): one._replace(names={part: names[tensor] for part, tensor in one.names.items()})
            for name, one in self.experts.items()
        }

    def leave_out(self, is_unread: Callable[[str], bool]) -> None:
        """Forget quantized layers that a model's class does not read, by the names of their weights.

        Their tensors stay in `tensors`.
        """
        self.layers = {name: layer for name, layer in self.layers.items() if not is_unread(f"{name}.weight")}

    def stored_bytes(self, name: str) -> int:
        """Return the size in the checkpoint of a quantized layer or of a tensor."""
        layer = self.layers.get(name) or self.experts.get(name)
        names = [name] if layer is None else layer.names.values()
        infos = [self.tensors[one] for one in names if one in self.tensors]
        return sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)

    def check_model(self, where: str, wanted: Mapping[str, Wanted], optional: Callable[[str], bool]) -> None:
        """Compare the tensors with those of a model, and check the values of scales.

        Args:
            where: The caller, which errors begin with.
            wanted: The tensors of the model without quantized layers, by name.
            optional: Returns whether the checkpoint may have a tensor that the model does not have.

        Raises:
            ValueError: For tensors that are missing, surplus or of other shapes; for a bias that the model does not
                have, unless it is zeros; or as `check`.
        """
        # GPTQ's writers store a bias of zeros for layers without one.
        spare = sorted({f"{name}.bias" for name in self.layers} & self.tensors.keys() - wanted.keys())
        known = lambda name: name in spare or is_derived(name) or optional(name)
        check_tensors(where, self.path, self.dequantized, wanted, known)
        for name in spare:
            with self.read(name) as (tensor,):
                if tensor.any():
                    raise ValueError(f"{where}: {name} must be zeros, because the model has no such bias, got others")
        self.check()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        self._source.close()

    @contextmanager
    def read(self, *names: str) -> Iterator[list[Tensor]]:
        """Yield tensors in the memory of the files, not to be written to, and drop their pages afterwards."""
        try:
            yield [self._source.read(name) for name in names]
        finally:
            for name in names:
                self._source.release(name)

    @contextmanager
    def _tensors_of(self, layer: QuantizedLayer, lasts: tuple[str, ...] | None = None) -> Iterator[dict[str, Tensor]]:
        names = {last: name for last, name in layer.names.items() if lasts is None or last in lasts}
        with self.read(*names.values()) as tensors:
            yield dict(zip(names, tensors, strict=True))

    def check(self) -> None:
        """Check the values of scales, zero points and groups of all layers, without reading a weight.

        Raises:
            ValueError: For the first tensor that is invalid.
        """
        for name, layer in self.layers.items():
            with self._tensors_of(layer, layer.format.checked_tensors()) as tensors:
                fault = layer.format.check(tensors, layer.n, layer.k)
            if fault:
                last, rule, got = fault
                raise ValueError(f"{NAME}: {name}.{last} must {rule} ({layer.format.name}), got {got}")
        for name, experts in self.experts.items():
            with self._parts_of(experts) as tensors:
                fault = experts.format.check(tensors)
            if fault:
                part, rule, got = fault
                raise ValueError(f"{NAME}: {name}{part} must {rule} ({experts.format.name}), got {got}")

    @contextmanager
    def _parts_of(self, experts: StoredExperts) -> Iterator[dict[str, Tensor]]:
        with self.read(*experts.names.values()) as tensors:
            yield dict(zip(experts.names, tensors, strict=True))

    def blocks(self, name: str) -> Tensor:
        """Return quantized experts in the blocks of their format's kind, [experts, n, k / elements, bytes] uint8.

        If that is DENSE, [experts, n, k].

        Args:
            name: A key of `experts`.
        """
        experts = self.experts[name]
        try:
            with self._parts_of(experts) as tensors:
                return experts.format.blocks(tensors)
        except ValueError as error:
            raise ValueError(f"{NAME}: {name}, {experts.format.name}: {error}") from error

    def weight(
        self,
        name: str,
        dtype: torch.dtype,
        rows: slice = slice(None),
        columns: slice = slice(None),
        device: torch.device | str = "cpu",
    ) -> LinearWeight:
        """Return the weight of a quantized layer as the ops take it, in memory that may be the file's.

        Args:
            name: A key of `layers`.
            dtype: The dtype of activations, and of the weight if no op takes the layer's integers.
            rows: The rows to return.
            columns: The columns to return.
            device: Where the weight will be multiplied; it is returned on the CPU.

        Raises:
            ValueError: For invalid scales in a GGUF file, and for columns that cut a group or an act-order.
        """
        layer = self.layers[name]
        activations: Literal["own", "int8"] = "int8" if self.activations or layer.format.quantizes_x else "own"
        target = Target.of(dtype, torch.device(device), activations)
        try:
            with self._tensors_of(layer) as tensors:
                part = layer.format.cut(tensors, layer.n, layer.k, rows, columns)
                if part is None:
                    whole = layer.format.weight(tensors, layer.n, layer.k, target)
                    return whole.cut(rows, columns)._replace(activations=activations)
                n, k = (len(range(size)[of]) for size, of in ((layer.n, rows), (layer.k, columns)))
                return layer.format.weight(part, n, k, target)._replace(activations=activations)
        except ValueError as error:
            raise ValueError(f"{NAME}: {name}, {layer.format.name}: {error}") from error

    def release(self, name: str) -> None:
        """Drop the pages of a quantized layer, for a caller that has copied its weight."""
        for tensor in self.layers[name].names.values():
            self._source.release(tensor)

    def dequantize(self, name: str, first: int = 0, count: int = -1) -> Tensor:
        """Return the values [n, k] of a quantized layer by its format's formula, in float64.

        Args:
            name: A key of `layers`.
            first: The first row, a multiple of 32.
            count: The number of rows; -1: all.
        """
        layer = self.layers[name]
        with self._tensors_of(layer) as tensors:
            return layer.format.dequantize(tensors, layer.n, layer.k, first, count)


def open_checkpoint(name: str | Path, activations: Activations | None = None) -> Checkpoint:
    """Open a checkpoint; its description, names, dtypes and shapes are checked, and no weight is read.

    Args:
        name: A folder with config.json and safetensors files, a .gguf file, or "owner/model" of the hub.
        activations: As Checkpoint's.

    Returns:
        The checkpoint, to be closed or used in a `with` statement.

    Raises:
        FileNotFoundError: For a folder or file that does not exist, or a name that is not in the hub's cache.
        ImportError: For a .gguf file without the package gguf.
        ValueError: For a description that is unknown or contradicts itself, or tensors that contradict it.
        NotImplementedError: For a variant of a format that is not supported.
    """
    if activations not in (None, "int8"):
        raise ValueError(f"{NAME}: activations must be 'int8' or None, got {activations!r}")
    path = find(name)
    if path.suffix == ".gguf" and path.is_file():
        config, source, layers, experts = open_gguf(path)
        return Checkpoint(path, config, source, layers, activations, experts)
    config = read_object(path / "config.json")
    folder = SafetensorsFolder(files_of(path))
    entry, where = config.get("quantization_config"), path / "config.json"
    markers = {method.markers[0] for method in METHODS.values() if method.file is not None}
    if entry is None and any(name.rpartition(".")[2] in markers for name in folder.tensors):
        entry, where = separate_description(path)
    ours = isinstance(entry, Mapping) and entry.get("quant_method") == OURS
    if entry is None or ours:
        return Checkpoint(path, config, folder, {}, activations)
    layers = layers_of(entry, folder.tensors, str(where), folder.read)
    return Checkpoint(path, config, folder, layers, activations, experts_of(entry, folder.tensors, str(where)))


def config_values(path: Path) -> dict[str, Any]:
    """Return the values of a folder's config.json, or those that a GGUF file's metadata stand for.

    Raises:
        ValueError, FileNotFoundError, NotImplementedError: If the checkpoint cannot be read.
    """
    if path.is_file():
        with open_checkpoint(path) as checkpoint:
            return dict(checkpoint.config)
    return read_object(path / "config.json")


def is_foreign(path: Path) -> bool:
    """Return whether a model's file or folder is GGUF, or was quantized by another library than this one."""
    if path.is_file():
        return path.suffix == ".gguf"
    try:
        entry = read_object(path / "config.json").get("quantization_config")
    except (OSError, ValueError):
        return False  # the reader of configs raises the error
    if entry is None:
        return any((path / method.file).is_file() for method in METHODS.values() if method.file is not None)
    return not isinstance(entry, dict) or entry.get("quant_method") != OURS


def method_of(path: Path) -> str | None:
    """Return how a checkpoint is quantized by another library: its quant_method, "gguf" for a GGUF file; else None."""
    if not is_foreign(path):
        return None
    if path.is_file():
        return "gguf"
    entry = read_object(path / "config.json").get("quantization_config")
    if entry is None:
        return str(separate_description(path)[0]["quant_method"])
    return str(entry.get("quant_method")) if isinstance(entry, Mapping) else None


def separate_description(folder: Path) -> tuple[dict[str, Any], Path]:
    """Return the description of a folder that has it in a file beside config.json, and this file."""
    for method in METHODS.values():
        if method.file is not None and (folder / method.file).is_file():
            return {"quant_method": method.name, **read_object(folder / method.file)}, folder / method.file
    raise ValueError(f"{NAME}: a folder with packed weights must have a quantization_config, got {folder} without one")
