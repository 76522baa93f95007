"""Formats of quantized weights: how each is stored, made from full precision and multiplied.

Modules of this package that define FORMAT or FORMATS have them (format.py has the interface): a new file is a new
format.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch

from .blocks import (
    BlockFormat,
    experts_in_panels,
    experts_out_of_panels,
    in_panels,
    out_of_panels,
    panels_of,
    served_on,
)
from .format import Format, Integers, TensorSpec
from .quantize import (
    dequantize_int4,
    dequantize_int8,
    pack_int4,
    quantize_int4,
    quantize_int8,
    quantizes_x,
    unpack_int4,
)


def _found() -> dict[str, Format]:
    modules = (import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__))
    formats: list[Format] = []
    for module in modules:
        formats += [module.FORMAT] if hasattr(module, "FORMAT") else getattr(module, "FORMATS", ())
    return {one.name: one for one in sorted(formats, key=lambda one: (not one.serves, one.serves, one.order))}


FORMATS = _found()  # by name; of the formats with the same `serves`, the preferred one first
BLOCKS = frozenset(name for name, one in FORMATS.items() if not one.serves)  # kinds of block, only from checkpoints


def served() -> tuple[str, ...]:
    """Return the `weights=` names that stand for the best format of a device."""
    return tuple(dict.fromkeys(one.serves for one in FORMATS.values() if one.serves))


def names() -> tuple[str, ...]:
    """Return the values of a model's `weights=` besides full precision: the served names, and each format's own."""
    return (*served(), *(one.exact or one.name for one in FORMATS.values() if one.serves))


def best(weights: str, device: torch.device | str) -> Format:
    """Return the format that models on a device are quantized to for `weights=`.

    Raises:
        ValueError: For an unknown name, or a format that the device cannot quantize to.
    """
    for one in FORMATS.values():
        is_named = one.serves and weights in (one.serves, one.exact or one.name)
        if is_named and one.quantizes_on(torch.device(device)):
            return one
    if weights in names():
        raise ValueError(
            f"torch_infini.weights: {weights!r} must be quantized on the CPU, which has the kernels for that (then "
            f"move the model, or save it and load it elsewhere), got {device}"
        )
    raise ValueError(f"torch_infini.weights: weights must be one of {', '.join(names())}, got {weights!r}")


def respelled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a description that save_patched wrote, with "quantised" renamed to "quantized"."""
    # Folders saved before version 0.1.0 spell it "quantised" and stay readable.
    return {"quantized" if name == "quantised" else name: value for name, value in fields.items()}


__all__ = [
    "BLOCKS",
    "BlockFormat",
    "experts_in_panels",
    "experts_out_of_panels",
    "in_panels",
    "out_of_panels",
    "panels_of",
    "FORMATS",
    "Format",
    "Integers",
    "TensorSpec",
    "best",
    "dequantize_int4",
    "dequantize_int8",
    "names",
    "pack_int4",
    "quantize_int4",
    "quantize_int8",
    "quantizes_x",
    "respelled",
    "served",
    "served_on",
    "unpack_int4",
]
