"""Which dense products on the CPU are ours and which are ATen's (oneDNN, MKL), from how many rows on.

The table is that of csrc/infiniop/gemm/library.cpp. One that
`python -m torch_infini tune --store` measured on this machine is used instead, from the next import on.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from .cpu import cpu_name
from .dtypes import INFINI_DTYPES
from .library import PATH, RUNTIME, cpu_capability

# linear and fused_linear; gemm and matmul; a batch of such products, each with a b of its own; conv whose windows
# overlap; conv whose windows do not. Rows of conv are the output channels (the positions of an image, if fewer).
Product = Literal["linear", "matmul", "batched", "conv", "patches"]
PRODUCTS: tuple[Product, ...] = get_args(Product)
DTYPES = {dtype: int(INFINI_DTYPES[dtype]) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
NEVER = 2**63 - 1
FORMAT = 3

# Product and dtype -> from how many rows on ATen is called, or None for never.
Table = Mapping[tuple[Product, torch.dtype], "int | None"]
Size = int | None | Literal["default"]  # "default": what the sources say of the level in use

_chosen: dict[tuple[Product, torch.dtype], Size] = {}  # where that is not "default"

_library = ctypes.CDLL(str(PATH))
_library.infiniTorchLibraryFrom.argtypes = [ctypes.c_int, ctypes.c_int]
_library.infiniTorchLibraryFrom.restype = ctypes.c_int64
_library.infiniTorchLibraryBelow.argtypes = [ctypes.c_int, ctypes.c_int]
_library.infiniTorchLibraryBelow.restype = ctypes.c_int64
_library.infiniTorchSetLibraryFrom.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]


def aten_from(product: Product, dtype: torch.dtype) -> int | None:
    """From how many rows on (columns, if they are fewer) ATen computes a product at the level in use; None: never."""
    size = _library.infiniTorchLibraryFrom(PRODUCTS.index(product), DTYPES[dtype])
    return None if size == NEVER else size


def aten_below(product: Product, dtype: torch.dtype) -> int | None:
    """Below how many rows ATen computes it, where there is such a limit: the sources' table has some."""
    size = _library.infiniTorchLibraryBelow(PRODUCTS.index(product), DTYPES[dtype])
    return None if size == NEVER else size


def set_aten_from(product: Product, dtype: torch.dtype, size: Size) -> None:
    """Call ATen from so many rows on, never (None), or as the sources' table says ("default")."""
    number = 0 if size == "default" else NEVER if size is None else size
    if size is not None and size != "default" and size < 1:
        raise ValueError(f"torch_infini: a product's size must be at least 1, got {size}")
    if _library.infiniTorchSetLibraryFrom(PRODUCTS.index(product), DTYPES[dtype], number):
        raise RuntimeError(RUNTIME.infiniGetLastErrorMessage().decode())
    _chosen[product, dtype] = size


@contextmanager
def aten_from_set_to(size: Size) -> Iterator[None]:
    """Run the body with ATen's products from so many rows on, of every dtype; None: with our kernels alone."""
    before = {(product, dtype): _chosen.get((product, dtype), "default") for product in PRODUCTS for dtype in DTYPES}
    try:
        for product, dtype in before:
            set_aten_from(product, dtype, size)
        yield
    finally:
        for (product, dtype), old in before.items():
            set_aten_from(product, dtype, old)


def described(dtype: torch.dtype, products: Iterable[Product] = PRODUCTS) -> str:
    """What computes products of a dtype on the CPU, in words."""

    def by(product: Product) -> str:
        size = aten_from(product, dtype)
        below = aten_below(product, dtype)
        if size is None:
            return "torch_infini"
        return f"torch_infini, from {size} rows on ATen" + ("" if below is None else f", from {below} on torch_infini")

    linear, *others = ((product, by(product)) for product in products)
    rest = "; ".join(f"{product}: {way}" for product, way in others if way != linear[1])
    return f"{linear[1]} ({rest})" if rest else linear[1]


# ---- the file ----


def default_file() -> Path:
    """Where `tune --store` writes unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # Path.home() raises where there is none
    return Path(cache) / "torch_infini" / "products.json"


def machine() -> dict[str, str]:
    """What a table is of: with another CPU, level or torch it is not used."""
    return {"cpu": cpu_name(), "capability": cpu_capability(), "torch": torch.__version__}


def write(file: Path, table: Table, measured: list[dict[str, Any]]) -> None:
    """Store a table with what it was made from."""
    sizes: dict[str, dict[str, int | None]] = {product: {} for product in PRODUCTS}
    for (product, dtype), size in table.items():
        sizes[product][str(dtype).removeprefix("torch.")] = size
    text = json.dumps({"format": FORMAT, **machine(), "aten_from": sizes, "measured": measured}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    new.write_text(text + "\n")
    new.replace(file)


class BadTable(ValueError):
    """A file that is no table of products, and why."""


def read(file: Path) -> tuple[dict[str, str], Table]:
    """The machine of a stored table, and the table.

    Raises:
        BadTable: If the file cannot be read or is none.
    """
    try:
        stored = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadTable(str(error)) from error
    try:
        if stored["format"] != FORMAT:
            raise BadTable(f"its format is {stored['format']!r}, not {FORMAT}")
        table = {
            (product, getattr(torch, name)): size
            for product in PRODUCTS
            for name, size in stored["aten_from"][product].items()
        }
        of = {key: str(stored[key]) for key in machine()}
    except (KeyError, TypeError, AttributeError) as error:
        raise BadTable(f"it has no valid entry {error}") from error
    for (_, dtype), size in table.items():
        if dtype not in DTYPES or not (size is None or (isinstance(size, int) and 1 <= size < NEVER)):
            raise BadTable(f"{size!r} for {dtype} is neither a number of rows nor null")
    return of, table


@dataclass(frozen=True)
class TableSource:
    """Where the table in use comes from.

    Attributes:
        file: A stored table, or None for the sources' own.
        reason: Why a stored table is not used, or none at all; empty where it is, or where there is none.
    """

    file: Path | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.file is None and self.reason:
            return self.reason
        built_in = f"built in ({self.reason})" if self.reason else "built in"
        return f"measured here, {self.file}" if self.file and not self.reason else built_in


def load() -> TableSource:
    """Use the table that INFINI_PRODUCTS names or that was stored on this machine; at import.

    Raises:
        ImportError: If INFINI_PRODUCTS names a file that is no table. "default": the built-in one; "ours": never ATen.
    """
    wish = os.environ.get("INFINI_PRODUCTS")
    if wish == "default":
        return TableSource()
    if wish == "ours":
        for product in PRODUCTS:
            for dtype in DTYPES:
                set_aten_from(product, dtype, None)
        return TableSource(reason="INFINI_PRODUCTS=ours: never ATen")
    file = Path(wish) if wish else default_file()
    if not wish and not os.path.isfile(file):  # also where it may not be looked at
        return TableSource()
    try:
        of, table = read(file)
    except BadTable as error:
        if wish:
            raise ImportError(
                "torch_infini: INFINI_PRODUCTS must be a file that `python -m torch_infini tune --store` wrote, "
                f"'default' or 'ours', got {wish}: {error}"
            ) from error
        return TableSource(file, f"{file} is no table of products: {error}")
    for key, value in machine().items():
        if of[key] != value:
            return TableSource(file, f"{file} is for {key} {of[key]!r}, here it is {value!r}: run `tune --store` again")
    for (product, dtype), size in table.items():
        set_aten_from(product, dtype, size)
    return TableSource(file)


SOURCE = load()
