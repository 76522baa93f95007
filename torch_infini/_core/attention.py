"""Whether long plain prefill on CUDA is torch's own fused attention (flash, cuDNN), decided at import.

Which calls those are: library_takes() of csrc/infiniop/attention/library.cpp.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .library import PATH, RUNTIME

NEVER = 2**63 - 1
# What attention_torch.cpp calls, and the types that it gives and expects. An operator with an underscore may change.
OPERATORS = {
    "_fused_sdp_choice": "(Tensor, Tensor, Tensor, Tensor?, float, bool, float?, bool) -> (int)",
    "scaled_dot_product_attention": "(Tensor, Tensor, Tensor, Tensor?, float, bool, float?, bool) -> (Tensor)",
}

_library = ctypes.CDLL(str(PATH))
_library.infiniTorchAttentionFrom.restype = ctypes.c_int64
_library.infiniTorchAttentionQueries.restype = ctypes.c_int64
_library.infiniTorchSetAttentionFrom.argtypes = [ctypes.c_int64]


def torch_attention_from() -> int | None:
    """From how many queries on torch computes a plain call on CUDA; None: never."""
    queries: int = _library.infiniTorchAttentionFrom()
    return None if queries == NEVER else queries


def set_torch_attention_from(queries: int | None) -> None:
    """Let torch compute plain calls on CUDA from so many queries on, or never (None)."""
    if _library.infiniTorchSetAttentionFrom(NEVER if queries is None else queries):
        raise ValueError(RUNTIME.infiniGetLastErrorMessage().decode())


@contextmanager
def torch_attention_from_set_to(queries: int | None) -> Iterator[None]:
    """Run the body with torch's attention from so many queries on; None: with our kernels alone."""
    before = torch_attention_from()
    try:
        set_torch_attention_from(queries)
        yield
    finally:
        set_torch_attention_from(before)


def signature(name: str) -> str:
    """The types that an operator of aten takes and returns, "" where this torch has none of the name."""
    try:
        schema = getattr(torch.ops.aten, name).default._schema
    except AttributeError:
        return ""
    takes, returns = (", ".join(str(x.type) for x in side) for side in (schema.arguments, schema.returns))
    for type_ in ("Tensor", "float"):
        takes = takes.replace(f"Optional[{type_}]", f"{type_}?")
    return f"({takes}) -> ({returns})"


def refusal() -> str:
    """Why our kernels compute every call in this process, or ""."""
    if os.environ.get("INFINI_PRODUCTS") == "ours":
        return "INFINI_PRODUCTS=ours"
    if torch.version.cuda is None:
        return "this torch has no CUDA"
    if hasattr(RUNTIME, "infinirtEmulatesCuda"):
        return "CUDA is emulated"
    changed = [name for name, expected in OPERATORS.items() if signature(name) != expected]
    return f"this torch has another aten::{changed[0]}" if changed else ""


def described() -> str:
    """What computes attention on CUDA, in words."""
    queries = torch_attention_from()
    if queries is None:
        return f"torch_infini ({refusal()})" if refusal() else "torch_infini"
    return f"torch_infini, plain calls from {queries} queries on torch"


if not refusal():
    set_torch_attention_from(_library.infiniTorchAttentionQueries())
