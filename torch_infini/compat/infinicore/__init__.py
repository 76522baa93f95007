"""InfiniCore's Python interface: tensors, ops, modules, context and graphs, on libinfinicore_cpp_api.

    import torch_infini.compat.infinicore as ic

    x = ic.ones([2, 8], dtype=ic.float32, device=ic.device("cpu"))
    y = ic.nn.functional.silu(x + x)

dtype and device must always be given. Between start_graph_recording() and stop_graph_recording() ops are noted, not
run. `float`, `int` and `bool` are dtypes here. docs/infinicore.md describes the package.
"""

from . import _aten, context, graph, lib, nn, ops, utils
from ._aten import *  # noqa: F403
from ._ntops import find_ntops
from .context import (
    get_device,
    get_device_count,
    get_stream,
    is_graph_recording,
    set_device,
    start_graph_recording,
    stop_graph_recording,
    sync_device,
    sync_stream,
)
from .device import device
from .device_event import DeviceEvent
from .dtype import (
    bfloat16,
    bool,
    cdouble,
    cfloat,
    chalf,
    complex32,
    complex64,
    complex128,
    double,
    dtype,
    float,
    float16,
    float32,
    float64,
    half,
    int,
    int8,
    int16,
    int32,
    int64,
    long,
    short,
    uint8,
)
from .ops import (
    add,
    add_rms_norm,
    add_rms_norm_,
    attention,
    matmul,
    mul,
    narrow,
    paged_attention,
    paged_attention_prefill,
    paged_caching,
    rearrange,
    squeeze,
    unsqueeze,
)
from .tensor import (
    Tensor,
    empty,
    empty_like,
    from_blob,
    from_dlpack,
    from_list,
    from_numpy,
    from_torch,
    ones,
    strided_empty,
    strided_from_blob,
    zeros,
)

_found = find_ntops(__name__)
use_ntops = _found is not None
if use_ntops:
    ntops = _found

__all__ = [
    "DeviceEvent",
    "Tensor",
    "add",
    "add_rms_norm",
    "add_rms_norm_",
    "attention",
    "bfloat16",
    "bool",
    "cdouble",
    "cfloat",
    "chalf",
    "complex128",
    "complex32",
    "complex64",
    "context",
    "device",
    "double",
    "dtype",
    "empty",
    "empty_like",
    "float",
    "float16",
    "float32",
    "float64",
    "from_blob",
    "from_dlpack",
    "from_list",
    "from_numpy",
    "from_torch",
    "get_device",
    "get_device_count",
    "get_stream",
    "graph",
    "half",
    "int",
    "int16",
    "int32",
    "int64",
    "int8",
    "is_graph_recording",
    "lib",
    "long",
    "matmul",
    "mul",
    "narrow",
    "nn",
    "ones",
    "ops",
    "paged_attention",
    "paged_attention_prefill",
    "paged_caching",
    "rearrange",
    "set_device",
    "short",
    "squeeze",
    "start_graph_recording",
    "stop_graph_recording",
    "strided_empty",
    "strided_from_blob",
    "sync_device",
    "sync_stream",
    "uint8",
    "unsqueeze",
    "use_ntops",
    "utils",
    "zeros",
    *_aten.__all__,
]
