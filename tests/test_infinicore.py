"""infinicore's names: every name of its interface with its signature; dtypes, devices, events, the package itself."""

from __future__ import annotations

import ast
import copy
import inspect
import os
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_infini.compat.infinicore as ic
from support.fresh_python import run_python
from torch_infini.compat.infinicore import utils
from torch_infini.compat.infinicore.lib import _infinicore as raw

ROOT = Path(__file__).resolve().parent.parent
CPU = ic.device("cpu")

# The interface that scripts are written for; "..." stands for more parameters.
SIGNATURES = """
empty(size, *, dtype=None, device=None, pin_memory=False)
empty_like(input, *, dtype=None, device=None)
strided_empty(size, strides, *, dtype=None, device=None, pin_memory=False)
zeros(size, *, dtype=None, device=None, pin_memory=False)
ones(size, *, dtype=None, device=None, pin_memory=False)
from_blob(data_ptr, size, *, dtype=None, device=None)
strided_from_blob(data_ptr, size, strides, *, dtype=None, device=None)
from_torch(torch_tensor)
from_numpy(np_array, *, dtype=None, device=None)
from_list(data, *, dtype=None, device=None)
Tensor(underlying, *, _torch_ref=None)
Tensor.data_ptr()
Tensor.size(dim=None)
Tensor.stride(dim=None)
Tensor.numel()
Tensor.is_contiguous()
Tensor.is_pinned()
Tensor.copy_(src)
Tensor.to(device)
Tensor.contiguous()
Tensor.as_strided(size, stride)
Tensor.permute(dims)
Tensor.view(shape)
Tensor.squeeze(dim)
Tensor.unsqueeze(dim)
Tensor.narrow(dim, start, length)
Tensor.debug(filename=None)
Tensor.__add__(other)
Tensor.__iadd__(other)
Tensor.__mul__(other)
Tensor.__matmul__(other)
dtype(data_type)
device(type=None, index=None)
DeviceEvent(enable_timing=False, device=None)
get_device()
context.get_device()
get_device_count(device_type)
context.get_device_count(device_type)
set_device(device)
context.set_device(device)
sync_stream()
context.sync_stream()
sync_device()
context.sync_device()
get_stream()
context.get_stream()
is_graph_recording()
context.is_graph_recording()
start_graph_recording(device=None)
context.start_graph_recording(device=None)
stop_graph_recording()
context.stop_graph_recording()
graph.Graph(graph)
add(input, other, *, out=None)
mul(input, other, *, out=None)
matmul(input, other, *, alpha=1.0, out=None)
add_rms_norm(a, b, weight, epsilon=1e-5, *, out=None)
add_rms_norm_(y, residual_out, a, b, weight, epsilon=1e-5)
attention(q, k, v, k_cache, v_cache, pos, *, out=None)
narrow(input, dim, start, length)
squeeze(input, dim)
unsqueeze(input, dim)
rearrange(input, other, *, out=None)
paged_caching(k_cache, v_cache, k, v, slot_mapping)
paged_attention(q, k_cache, v_cache, block_tables, cache_lens, alibi_slopes=None, scale=1.0, *, out=None)
paged_attention_prefill(q, k_cache, v_cache, block_tables, history_lens, cu_seqlens_q, alibi_slopes=None, \
scale=1.0, *, out=None)
nn.functional.causal_softmax(input, out=None)
nn.functional.embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, \
scale_grad_by_freq=False, sparse=False, *, out=None)
nn.functional.linear(input, weight, bias=None, *, out=None)
nn.functional.random_sample(logits, random_val, topp, topk, temperature, *, out=None)
nn.functional.rms_norm(input, normalized_shape, weight, eps=1e-5, *, out=None)
nn.functional.rope(x, pos_ids, sin_table, cos_table, algo=RopeAlgo.GPT_NEOX, *, out=None)
nn.functional.silu(input, inplace=False, *, out=None)
nn.functional.swiglu(input, other, *, out=None)
nn.Module()
nn.ModuleList(modules=None)
nn.Linear(in_features, out_features, bias=False, device=None, dtype=None)
nn.RMSNorm(normalized_shape, eps=1e-6, elementwise_affine=True, device=None, dtype=None)
nn.Embedding(num_embeddings, embedding_dim, padding_idx=None, ..., device=None, dtype=None)
nn.RoPE(max_position_embeddings, rope_theta, head_dim, device=None, dtype=None)
nn.Parameter(data)
nn.RoPE.forward(states, position_ids, algo=RopeAlgo.GPT_NEOX)
"""
DTYPES = {
    "F32": "float32 float",
    "F64": "float64 double",
    "C32": "complex32 chalf",
    "C64": "complex64 cfloat",
    "C128": "complex128 cdouble",
    "F16": "float16 half",
    "BF16": "bfloat16",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16 short",
    "I32": "int32 int",
    "I64": "int64 long",
    "BOOL": "bool",
}


def find(name: str) -> Any:
    found: Any = ic
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("line", [line for line in SIGNATURES.splitlines() if line])
def test_signature(line: str) -> None:
    name, _, parameters = line.partition("(")
    wanted = parameters.removesuffix(")").replace("...", "**more")
    if name == "rearrange":
        wanted = wanted.replace("other", "other=None")  # documents show rearrange(x)
    if "**more" in wanted:  # Python has it last
        names = [part.strip().partition("=")[0] for part in parameters.removesuffix(")").split(",")]
        ours = [*inspect.signature(find(name)).parameters]
        assert [each for each in ours if each in names] == [each for each in names if each != "..."]
        return
    arguments = ast.parse(f"def f({wanted}): pass").body[0].args  # type: ignore[attr-defined]
    function = find(name)
    found = list(inspect.signature(function).parameters.values())
    if found and found[0].name == "self":
        found = found[1:]
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD: "", inspect.Parameter.KEYWORD_ONLY: "*"}
    ours = [(kinds[p.kind], p.name) for p in found]
    assert ours == [("", a.arg) for a in arguments.args] + [("*", a.arg) for a in arguments.kwonlyargs]
    defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults + arguments.kw_defaults
    for parameter, default in zip(found, defaults, strict=True):
        if default is None:
            assert parameter.default is inspect.Parameter.empty
        elif isinstance(default, ast.Attribute):
            assert parameter.default == getattr(ic.nn.functional.RopeAlgo, default.attr)
        else:
            assert parameter.default == ast.literal_eval(default)
            assert type(parameter.default) is type(ast.literal_eval(default))


@pytest.mark.parametrize(("kind", "names"), DTYPES.items())
def test_dtypes(kind: str, names: str) -> None:
    for name in names.split():
        dtype = getattr(ic, name)
        assert dtype._underlying == getattr(raw.DataType, kind)
        assert dtype == ic.dtype(getattr(raw.DataType, kind))
        assert hash(dtype) == hash(getattr(ic, names.split()[0]))
        assert repr(dtype) == f"infinicore.{names.split()[0]}"
        assert {dtype: 1}[getattr(ic, names.split()[0])] == 1
    assert ic.float32 != ic.float64 and ic.float32 != "float32"


def test_dtype_needs_a_data_type() -> None:
    with pytest.raises(TypeError, match="data_type must be an _infinicore.DataType, got 'float32'"):
        ic.dtype("float32")  # type: ignore[arg-type]


def test_names_are_listed() -> None:
    """__all__ names what is there, once, and `import *` takes it."""
    assert len(set(ic.__all__)) == len(ic.__all__)
    for name in ic.__all__:
        assert hasattr(ic, name), name
    for line in SIGNATURES.split():
        name = line.partition("(")[0].partition(".")[0]
        if name.isidentifier() and hasattr(ic, name):
            assert name in ic.__all__ or line.endswith(",") or ")" in line, name


def test_raw_enumerations() -> None:
    """Names in the order that scripts walk them in; COUNT is the last device type."""
    assert list(raw.Device.Type.__members__) == (
        ["CPU", "NVIDIA", "CAMBRICON", "ASCEND", "METAX", "MOORE", "ILUVATAR", "QY", "KUNLUN", "HYGON", "COUNT"]
    )
    names = "BYTE BOOL I8 I16 I32 I64 U8 U16 U32 U64 F8 F16 F32 F64 C16 C32 C64 C128 BF16"
    assert " ".join(raw.DataType.__members__) == names
    assert list(raw.RoPEAlgo.__members__) == ["GPT_J", "GPT_NEOX"]
    assert int(raw.Device.Type.QY) == 9 and int(raw.DataType.BF16) == 19
    assert (
        ic.nn.functional.RopeAlgo.GPT_J is raw.RoPEAlgo.GPT_J or ic.nn.functional.RopeAlgo.GPT_J == raw.RoPEAlgo.GPT_J
    )


def test_raw_device() -> None:
    device = raw.Device()
    assert (device.type, device.index) == (raw.Device.Type.CPU, 0)
    assert str(device) == "CPU:0"
    assert device == raw.Device(raw.Device.Type.CPU) != raw.Device(raw.Device.Type.NVIDIA, 3)
    assert len({device, raw.Device(), raw.Device(type=raw.Device.Type.QY, index=1)}) == 2
    assert device != "CPU:0"


# ---- devices ----


def test_device() -> None:
    assert (ic.device().type, ic.device().index) == ("cpu", 0)
    for same in (ic.device("cuda:2"), ic.device("cuda", 2), ic.device(ic.device("cuda", 2)), ic.device("nvidia:2")):
        assert same == ic.device("cuda", 2)
        assert str(same) == "cuda:2"
        assert hash(same) == hash(ic.device("cuda:2"))
    assert ic.device("cuda") == ic.device("cuda:0") != ic.device("cpu")
    assert ic.device("nvidia").type == "cuda"
    assert repr(ic.device("npu", 1)) == "device(type='npu', index=1)"
    assert ic.device("cpu")._underlying == raw.Device()
    assert ic.device._from_infinicore_device(raw.Device()) == CPU
    assert ic.device._to_infinicore_device("cpu", 0) == raw.Device()


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (("cuda:0", 1), ValueError, 'index must not be given beside "cuda:0", got 1'),
        ((CPU, 0), ValueError, "index must not be given beside a device"),
        (("tpu",), ValueError, 'type must be one of cpu, cuda, mlu, npu, musa, got "tpu"'),
        (("cpu:x",), ValueError, 'type must be a name or "NAME:INDEX", got "cpu:x"'),
        (("cpu:-1",), ValueError, 'type must be a name or "NAME:INDEX", got "cpu:-1"'),
        (("cpu", -1), ValueError, "index must be an integer of at least 0, got -1"),
        (("cpu", 0.5), ValueError, "index must be an integer of at least 0, got 0.5"),
        ((3,), TypeError, "type must be a name or a device, got 3"),
    ],
)
def test_wrong_devices(arguments: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"infinicore.device: {sentence}"):
        ic.device(*arguments)


def test_absent_devices_raise_when_used() -> None:
    for name in ("mlu", "npu:3", "cpu:1"):
        device = ic.device(name)
        for error in (KeyError, RuntimeError):
            with pytest.raises(error, match=f'there is no device "{device}": found'):
                _ = device._underlying
        with pytest.raises(KeyError, match="there is no device"):
            ic.empty([2], dtype=ic.float32, device=device)


def test_device_counts() -> None:
    assert ic.get_device_count("cpu") == 1
    assert ic.get_device_count("nvidia") == ic.get_device_count("cuda")
    assert ic.get_device_count("mlu") == 0
    kinds = ("NVIDIA", "METAX", "ILUVATAR", "QY", "KUNLUN", "HYGON")
    assert ic.get_device_count("cuda") == sum(raw.get_device_count(getattr(raw.Device.Type, kind)) for kind in kinds)
    with pytest.raises(ValueError, match="device_type must be one of cpu"):
        ic.get_device_count("tpu")


def test_current_device() -> None:
    ic.set_device(CPU)
    ic.set_device("cpu")
    assert isinstance(ic.get_device(), raw.Device) and ic.get_device() == CPU._underlying
    assert isinstance(ic.get_stream(), int)
    assert ic.get_stream() == ic.get_stream()
    ic.sync_stream()
    ic.sync_device()
    with pytest.raises(TypeError, match="set_device: device must be an infinicore.device or its name, got 0"):
        ic.set_device(0)  # type: ignore[arg-type]


def test_memory_statistics() -> None:
    before = ic.context.memory_stats("cpu")
    x = ic.empty([1 << 20], dtype=ic.float32, device=CPU)
    with_x = ic.context.memory_stats(CPU)
    assert with_x["in_use"] >= before["in_use"] + (4 << 20)
    assert with_x["allocations"] == before["allocations"] + 1
    del x
    assert ic.context.memory_stats("cpu")["in_use"] == before["in_use"]
    ic.context.trim_memory("cpu")
    assert ic.context.memory_stats("cpu")["cached"] == 0


# ---- events ----


def test_events() -> None:
    start, end = ic.DeviceEvent(enable_timing=True), ic.DeviceEvent(True, device="cpu")
    assert not start.is_recorded and start.enable_timing and start.device == CPU
    start.record()
    end.record(ic.get_stream())
    end.synchronize()
    assert start.is_recorded and end.query()
    assert start.elapsed_time(end) >= 0 >= end.elapsed_time(start)
    start.wait()
    start.wait(ic.get_stream())
    assert repr(start) == "DeviceEvent(device=cpu:0, enable_timing=True, recorded)"
    assert (start.blocking, start.interprocess) == (False, False)


def test_events_without_timing() -> None:
    timed, plain = ic.DeviceEvent(True), ic.DeviceEvent()
    for event in (timed, plain):
        event.record()
    with pytest.raises(RuntimeError, match="other must be made with enable_timing=True"):
        timed.elapsed_time(plain)
    with pytest.raises(RuntimeError, match="this event must be made with enable_timing=True"):
        plain.elapsed_time(timed)
    with pytest.raises(RuntimeError):
        plain._underlying.elapsed_time(plain._underlying)
    with pytest.raises(TypeError, match="other must be a DeviceEvent, got 3"):
        timed.elapsed_time(3)  # type: ignore[arg-type]


def test_raw_events() -> None:
    """Flags are CUDA's numbers: 2 is without timing."""
    for made in (
        raw.DeviceEvent(),
        raw.DeviceEvent(1),
        raw.DeviceEvent(raw.Device()),
        raw.DeviceEvent(raw.Device(), 0),
    ):
        made.record()
        assert made.elapsed_time(made) == 0 and made.device == raw.Device()
    for plain in (raw.DeviceEvent(2), raw.DeviceEvent(flags=3), raw.DeviceEvent(device=raw.Device(), flags=2)):
        plain.record()
        with pytest.raises(RuntimeError):
            plain.elapsed_time(plain)
    with pytest.raises(RuntimeError, match="flags must be an or of 1"):
        raw.DeviceEvent(4)


# ---- utils ----


NAMED = ("float16", "float32", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "float64", "bool", "complex64")


@pytest.mark.parametrize("name", NAMED)
def test_dtype_conversions(name: str) -> None:
    ours, theirs = getattr(ic, name), getattr(torch, name)
    assert utils.to_torch_dtype(ours) == theirs
    assert utils.to_infinicore_dtype(theirs) == ours
    in_numpy = utils.infinicore_to_numpy_dtype(ours)
    assert in_numpy.name == name
    assert utils.numpy_to_infinicore_dtype(in_numpy) == ours
    assert utils.numpy_to_infinicore_dtype(in_numpy.type) == ours


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (utils.to_torch_dtype, ic.dtype(raw.DataType.C16)),
        (utils.to_torch_dtype, torch.float32),
        (utils.to_infinicore_dtype, torch.float8_e5m2),
        (utils.to_infinicore_dtype, None),
        (utils.numpy_to_infinicore_dtype, "U3"),
        (utils.numpy_to_infinicore_dtype, object),
        (utils.infinicore_to_numpy_dtype, ic.complex32),
    ],
)
def test_unsupported_dtypes(function: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="^Unsupported "):
        function(value)


# ---- the package ----


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return run_python(code, env=env)


def test_torch_infini_does_not_import_it() -> None:
    done = python("import sys, torch_infini; print([m for m in sys.modules if 'infinicore' in m])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_another_python(tmp_path: Path) -> None:
    """What an import says where the module was built for another Python, or not at all."""
    from torch_infini._core.library import PATH

    for library in PATH.parent.glob("lib*.so"):
        (tmp_path / library.name).symlink_to(library)
    said = python("import torch_infini.compat.infinicore", INFINI_LIBRARIES=str(tmp_path)).stderr.splitlines()[-1]
    assert "ImportError: infinicore needs _infinicore for cpython-3" in said
    assert "found none" in said and "pip install" in said
    (tmp_path / "_infinicore.cpython-39-x86_64-linux-gnu.so").touch()
    said = python("import torch_infini.compat.infinicore", INFINI_LIBRARIES=str(tmp_path)).stderr.splitlines()[-1]
    assert "found one for cpython-39-x86_64-linux-gnu" in said


def test_ntops_is_found(tmp_path: Path) -> None:
    """use_ntops and ntops are set at import; ntops' functions then know infinicore as `torch`."""
    assert ic.use_ntops is False and not hasattr(ic, "ntops")
    (tmp_path / "ntops" / "torch").mkdir(parents=True)
    (tmp_path / "ntops" / "__init__.py").write_text("from . import torch\n")
    (tmp_path / "ntops" / "torch" / "__init__.py").write_text("from .silu import silu\n")
    (tmp_path / "ntops" / "torch" / "silu.py").write_text(
        "import torch\n\ndef silu(input, inplace=False):\n    return torch.empty_like(input)\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch_infini.compat.infinicore as ic\n"
        "x = ic.zeros([2, 3], dtype=ic.float32, device='cpu')\n"
        "print(ic.use_ntops, ic.ntops.__name__, ic.ntops.torch.silu(x))\n"
    )
    assert python(code).stdout.strip() == (
        "True ntops infinicore.Tensor(shape=[2, 3], dtype=infinicore.float32, device=cpu:0)"
    )
    (tmp_path / "ntops" / "torch" / "silu.py").write_text("import a_package_that_is_nowhere\n")
    done = python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch_infini.compat.infinicore as ic\nprint(ic.use_ntops)"
    )
    assert done.stdout.strip() == "False"
    assert "ntops is installed and not used" in done.stderr and "a_package_that_is_nowhere" in done.stderr


def test_modules_of_the_documents() -> None:
    """The files that documents name; classes stand before modules of the same name."""
    code = (
        "import torch_infini.compat.infinicore.device, torch_infini.compat.infinicore.dtype\n"
        "import torch_infini.compat.infinicore as ic\n"
        "from torch_infini.compat.infinicore.device import device\n"
        "from torch_infini.compat.infinicore.tensor import Tensor\n"
        "from torch_infini.compat.infinicore.nn.parameter import Parameter\n"
        "from torch_infini.compat.infinicore.nn.modules.module import Module\n"
        "import torch_infini.compat.infinicore.ops, torch_infini.compat.infinicore.context\n"
        "import torch_infini.compat.infinicore.device_event\n"
        "print(ic.device is device, ic.Tensor is Tensor, ic.nn.Module is Module, ic.nn.Parameter is Parameter)\n"
        "print(ic.dtype(ic.lib._infinicore.DataType.F32), callable(ic.graph), ic.graph.Graph.__name__)"
    )
    assert python(code).stdout.splitlines() == ["True True True True", "infinicore.float32 True Graph"]


def test_parameters_are_neither_copied_nor_pickled() -> None:
    parameter = ic.nn.Parameter(ic.zeros([2], dtype=ic.float32, device=CPU))
    assert isinstance(parameter, ic.Tensor)
    for wrong in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="infinicore.nn.Parameter: cannot be"):
            wrong(parameter)
    with pytest.raises(ValueError, match="data must be an infinicore.Tensor, got 3"):
        ic.nn.Parameter(3)  # type: ignore[arg-type]
