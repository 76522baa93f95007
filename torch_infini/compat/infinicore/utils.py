"""Conversion of torch's and numpy's dtypes to infinicore's and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..._core.dtypes import INFINI_DTYPES, TORCH_DTYPES
from .dtype import dtype as DataType
from .lib import _infinicore

if TYPE_CHECKING:
    import numpy

_TORCH = {_infinicore.DataType(int(kind)): theirs for kind, theirs in TORCH_DTYPES.items()}
_FROM_TORCH = {theirs: _infinicore.DataType(int(kind)) for theirs, kind in INFINI_DTYPES.items()}
# bfloat16 is missing in numpy too, but ml_dtypes provides it.
_WITHOUT_NUMPY = (torch.complex32, torch.float8_e4m3fn)


def to_torch_dtype(infini_dtype: DataType) -> torch.dtype:
    """Return torch's dtype; ValueError for a dtype that torch lacks."""
    if not isinstance(infini_dtype, DataType) or infini_dtype._underlying not in _TORCH:
        raise ValueError(f"Unsupported infinicore dtype: {infini_dtype}")
    return _TORCH[infini_dtype._underlying]


def to_infinicore_dtype(torch_dtype: torch.dtype) -> DataType:
    """Return the dtype for a torch dtype; ValueError for a dtype that infinicore lacks."""
    if torch_dtype not in _FROM_TORCH:
        raise ValueError(f"Unsupported torch dtype: {torch_dtype}")
    return DataType(_FROM_TORCH[torch_dtype])


def numpy_to_infinicore_dtype(numpy_dtype: Any) -> DataType:
    """Return the dtype for a numpy dtype (anything numpy.dtype() accepts); ValueError for an unsupported one."""
    import numpy

    name = numpy.dtype(numpy_dtype).name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or found not in _FROM_TORCH or found in _WITHOUT_NUMPY:
        raise ValueError(f"Unsupported numpy dtype: {name}")
    return DataType(_FROM_TORCH[found])


def infinicore_to_numpy_dtype(infini_dtype: DataType) -> numpy.dtype[Any]:
    """Return numpy's dtype, for bfloat16 ml_dtypes' one; ValueError for a dtype that numpy lacks."""
    import numpy

    theirs = to_torch_dtype(infini_dtype)
    if theirs in _WITHOUT_NUMPY:
        raise ValueError(f"Unsupported infinicore dtype: {infini_dtype}")
    if theirs == torch.bfloat16:
        try:
            import ml_dtypes
        except ModuleNotFoundError as error:
            raise ImportError("numpy has bfloat16 only from ml_dtypes: run `pip install ml_dtypes`") from error
        return numpy.dtype(ml_dtypes.bfloat16)
    return numpy.dtype(str(theirs).removeprefix("torch."))
