"""The 123 names of InfiniCore's Python API: the documented signature of each, and a call by its names."""

import inspect
import os
import tempfile

import infinicore as ic
import numpy as np
import torch
from infinicore.lib import _infinicore as raw
from shown import show

cpu, f32, i64 = ic.device("cpu"), ic.float32, ic.int64
F = ic.nn.functional
memory = torch.arange(64.0)
here = memory.data_ptr()


def full(*shape):
    return ic.ones(list(shape), dtype=f32, device=cpu)


def longs(*values):
    return ic.from_list(list(values), dtype=i64)


def record():
    ic.start_graph_recording()
    ic.add(input=full(2), other=full(2))
    return ic.context.stop_graph_recording()


def debug():
    with tempfile.TemporaryDirectory() as folder:
        x.debug(filename=os.path.join(folder, "values"))
        return os.listdir(folder)


x = full(2, 3)
made = {"dtype": f32, "device": cpu}
caches = {"k_cache": full(4, 1, 2, 8), "v_cache": full(4, 1, 2, 8)}
tables = {"block_tables": ic.from_list([[1, 2]], dtype=i64)}
dense = {"q": full(2, 1, 8), "k": full(1, 1, 8), "v": full(1, 1, 8), "k_cache": full(1, 4, 8), "v_cache": full(1, 4, 8)}
halves = {"sin_table": full(4, 4), "cos_table": full(4, 4)}
OUT = "*, out=None"
MADE = "*, dtype=None, device=None"

# By name: the signature (None: no function, or one of C++, which keeps none), and a call.
NAMES = {
    "empty": (f"size, {MADE}, pin_memory=False", lambda: ic.empty(size=[2], pin_memory=False, **made)),
    "empty_like": (f"input, {MADE}", lambda: ic.empty_like(input=x, **made)),
    "strided_empty": (f"size, strides, {MADE}, pin_memory=False", lambda: ic.strided_empty([2], strides=[3], **made)),
    "zeros": (f"size, {MADE}, pin_memory=False", lambda: ic.zeros(size=[2], **made)),
    "ones": (f"size, {MADE}, pin_memory=False", lambda: ic.ones(size=[2], **made)),
    "from_blob": (f"data_ptr, size, {MADE}", lambda: ic.from_blob(data_ptr=here, size=[2], **made)),
    "strided_from_blob": (
        f"data_ptr, size, strides, {MADE}",
        lambda: ic.strided_from_blob(data_ptr=here, size=[2], strides=[3], **made),
    ),
    "from_torch": ("torch_tensor", lambda: ic.from_torch(torch_tensor=memory)),
    "from_numpy": (f"np_array, {MADE}", lambda: ic.from_numpy(np_array=np.ones(2), **made)),
    "from_list": (f"data, {MADE}", lambda: ic.from_list(data=[1], **made)),
    "Tensor": ("underlying, *, _torch_ref=None", lambda: ic.Tensor(underlying=x._underlying, _torch_ref=None)),
    "Tensor.shape": (None, lambda: x.shape),
    "Tensor.dtype": (None, lambda: x.dtype),
    "Tensor.device": (None, lambda: x.device),
    "Tensor.ndim": (None, lambda: x.ndim),
    "Tensor.data_ptr": ("self", lambda: x.data_ptr()),
    "Tensor.size": ("self, dim=None", lambda: x.size(dim=1)),
    "Tensor.stride": ("self, dim=None", lambda: x.stride(dim=1)),
    "Tensor.numel": ("self", lambda: x.numel()),
    "Tensor.is_contiguous": ("self", lambda: x.is_contiguous()),
    "Tensor.is_pinned": ("self", lambda: x.is_pinned()),
    "Tensor.copy_": ("self, src", lambda: x.copy_(src=full(2, 3))),
    "Tensor.to": (None, lambda: x.to(cpu)),
    "Tensor.contiguous": ("self", lambda: x.contiguous()),
    "Tensor.as_strided": ("self, size, stride", lambda: x.as_strided(size=[2], stride=[3])),
    "Tensor.permute": ("self, dims", lambda: x.permute(dims=[1, 0])),
    "Tensor.view": ("self, shape", lambda: x.view(shape=[6])),
    "Tensor.squeeze": ("self, dim", lambda: full(1, 2).squeeze(dim=0)),
    "Tensor.unsqueeze": ("self, dim", lambda: x.unsqueeze(dim=0)),
    "Tensor.narrow": ("self, dim, start, length", lambda: x.narrow(dim=1, start=1, length=2)),
    "Tensor.debug": ("self, filename=None", debug),
    "Tensor.__add__": ("self, other", lambda: x + x),
    "Tensor.__iadd__": ("self, other", lambda: full(2).__iadd__(full(2))),
    "Tensor.__mul__": ("self, other", lambda: x * x),
    "Tensor.__matmul__": ("self, other", lambda: x @ full(3, 4)),
    "dtype": ("data_type", lambda: ic.dtype(data_type=raw.DataType.F32)),
    **{
        name: (None, lambda name=name: ic.empty([1], dtype=getattr(ic, name), device=cpu))
        for name in [
            *("float32", "float", "float64", "double", "complex32", "chalf", "complex64", "cfloat", "complex128"),
            *("cdouble", "float16", "half", "bfloat16", "uint8", "int8", "int16", "short", "int32", "int", "int64"),
            *("long", "bool"),
        ]
    },
    "device": ("type=None, index=None", lambda: ic.device(type="cpu", index=0)),
    "DeviceEvent": ("enable_timing=False, device=None", lambda: ic.DeviceEvent(enable_timing=False, device=cpu)),
    "graph.Graph": (None, lambda: [ic.graph.Graph(raw.Graph()).run(), record().run()]),
    "add": (f"input, other, {OUT}", lambda: ic.add(input=x, other=x, out=full(2, 3))),
    "mul": (f"input, other, {OUT}", lambda: ic.mul(input=x, other=x, out=full(2, 3))),
    "matmul": ("input, other, *, alpha=1.0, out=None", lambda: ic.matmul(input=x, other=full(3, 2), alpha=1.0)),
    "add_rms_norm": (
        f"a, b, weight, epsilon=1e-5, {OUT}",
        lambda: ic.add_rms_norm(a=x, b=x, weight=full(3), epsilon=1e-5, out=(full(2, 3), full(2, 3))),
    ),
    "add_rms_norm_": (
        "y, residual_out, a, b, weight, epsilon=1e-5",
        lambda: ic.add_rms_norm_(y=full(2, 3), residual_out=full(2, 3), a=x, b=x, weight=full(3), epsilon=1e-5),
    ),
    "attention": (f"q, k, v, k_cache, v_cache, pos, {OUT}", lambda: ic.attention(**dense, pos=0, out=full(1, 2, 8))),
    "narrow": ("input, dim, start, length", lambda: ic.narrow(input=x, dim=0, start=0, length=1)),
    "squeeze": ("input, dim", lambda: ic.squeeze(input=full(1, 2), dim=0)),
    "unsqueeze": ("input, dim", lambda: ic.unsqueeze(input=x, dim=0)),
    "rearrange": (None, lambda: ic.rearrange(input=x, other=x, out=full(2, 3))),
    "paged_caching": (
        "k_cache, v_cache, k, v, slot_mapping",
        lambda: ic.paged_caching(**caches, k=full(1, 1, 8), v=full(1, 1, 8), slot_mapping=longs(2)),
    ),
    "paged_attention": (
        f"q, k_cache, v_cache, block_tables, cache_lens, alibi_slopes=None, scale=1.0, {OUT}",
        lambda: ic.paged_attention(
            q=full(1, 2, 8), **caches, **tables, cache_lens=longs(3), alibi_slopes=None, scale=1.0, out=full(1, 2, 8)
        ),
    ),
    "paged_attention_prefill": (
        f"q, k_cache, v_cache, block_tables, history_lens, cu_seqlens_q, alibi_slopes=None, scale=1.0, {OUT}",
        lambda: ic.paged_attention_prefill(
            q=full(2, 2, 8), **caches, **tables, history_lens=longs(3), cu_seqlens_q=longs(0, 2), scale=1.0
        ),
    ),
    "nn.functional.causal_softmax": ("input, out=None", lambda: F.causal_softmax(input=full(2, 2), out=full(2, 2))),
    "nn.functional.embedding": (
        f"input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False, {OUT}",
        lambda: F.embedding(input=longs(0), weight=x, padding_idx=None, max_norm=None, norm_type=2.0, sparse=False),
    ),
    "nn.functional.linear": (f"input, weight, bias=None, {OUT}", lambda: F.linear(input=x, weight=x, bias=full(2))),
    "nn.functional.random_sample": (
        f"logits, random_val, topp, topk, temperature, {OUT}",
        lambda: F.random_sample(logits=full(5), random_val=0.5, topp=1.0, topk=5, temperature=1.0),
    ),
    "nn.functional.rms_norm": (
        f"input, normalized_shape, weight, eps=1e-5, {OUT}",
        lambda: F.rms_norm(input=x, normalized_shape=[3], weight=full(3), eps=1e-5),
    ),
    "nn.functional.rope": (
        f"x, pos_ids, sin_table, cos_table, algo=None, {OUT}",
        lambda: F.rope(x=full(1, 1, 8), pos_ids=longs(1), **halves, algo=F.RopeAlgo.GPT_NEOX),
    ),
    "nn.functional.silu": (f"input, inplace=False, {OUT}", lambda: F.silu(input=x, inplace=False)),
    "nn.functional.swiglu": (f"input, other, {OUT}", lambda: F.swiglu(input=x, other=x)),
    "nn.functional.RopeAlgo": (None, lambda: [F.RopeAlgo.GPT_J, F.RopeAlgo.GPT_NEOX]),
    "nn.Module": ("", lambda: ic.nn.Module()),
    "nn.ModuleList": ("modules=None", lambda: ic.nn.ModuleList(modules=[ic.nn.Linear(2, 2)])),
    "nn.Linear": (
        "in_features, out_features, bias=False, device=None, dtype=None",
        lambda: ic.nn.Linear(in_features=2, out_features=3, bias=False, **made),
    ),
    "nn.RMSNorm": (
        "normalized_shape, eps=1e-6, elementwise_affine=True, device=None, dtype=None",
        lambda: ic.nn.RMSNorm(normalized_shape=3, eps=1e-6, elementwise_affine=True, **made),
    ),
    "nn.Embedding": (
        "num_embeddings, embedding_dim, padding_idx=None, *, device=None, dtype=None",
        lambda: ic.nn.Embedding(num_embeddings=2, embedding_dim=3, padding_idx=None, **made),
    ),
    "nn.RoPE": (
        "max_position_embeddings, rope_theta, head_dim, device=None, dtype=None",
        lambda: ic.nn.RoPE(max_position_embeddings=4, rope_theta=1e4, head_dim=8, **made)(
            states=full(1, 1, 1, 8), position_ids=ic.from_list([[1]], dtype=i64), algo=F.RopeAlgo.GPT_NEOX
        ),
    ),
    "nn.Parameter": ("data", lambda: ic.nn.Parameter(data=x)),
    "nn.functional": (None, lambda: ic.nn.functional),
    "utils.to_torch_dtype": (None, lambda: ic.utils.to_torch_dtype(f32)),
    "utils.to_infinicore_dtype": (None, lambda: ic.utils.to_infinicore_dtype(torch.float32)),
    "utils.numpy_to_infinicore_dtype": (None, lambda: ic.utils.numpy_to_infinicore_dtype(np.float32)),
    "utils.infinicore_to_numpy_dtype": (None, lambda: ic.utils.infinicore_to_numpy_dtype(f32)),
    "use_ntops": (None, lambda: ic.use_ntops),
    "lib._infinicore.DataType": (None, lambda: raw.DataType.__members__),
    "lib._infinicore.Device": (None, lambda: str(raw.Device(raw.Device.Type.CPU, 0))),
    "lib._infinicore.Tensor": (None, lambda: isinstance(x._underlying, raw.Tensor)),
    "lib._infinicore.free functions": (
        None,
        lambda: [
            raw.empty(shape=[2], dtype=raw.DataType.F32, device=raw.Device()),
            raw.zeros([2], raw.DataType.F32, raw.Device(), pin_memory=False),
            raw.ones([2], raw.DataType.F32, raw.Device(), False),
            raw.strided_empty(shape=[2], strides=[3], dtype=raw.DataType.F32, device=raw.Device()),
            raw.from_blob(raw_ptr=here, shape=[2], dtype=raw.DataType.F32, device=raw.Device()),
            raw.strided_from_blob(raw_ptr=here, shape=[2], strides=[3], dtype=raw.DataType.F32, device=raw.Device()),
            raw.get_device_count(device_type=raw.Device.Type.CPU),
            raw.set_device(device=raw.get_device()),
            [raw.get_stream(), raw.sync_stream(), raw.sync_device(), raw.is_graph_recording()],
        ],
    ),
    "lib._infinicore.ops": (
        None,
        lambda: [
            getattr(raw, f"{name}{suffix}")
            for name in [
                "add",
                "mul",
                "matmul",
                "linear",
                "rms_norm",
                "add_rms_norm",
                "attention",
                "causal_softmax",
                "embedding",
                "rope",
                "random_sample",
                "silu",
                "swiglu",
                "rearrange",
                "paged_attention",
                "paged_attention_prefill",
                "paged_caching",
            ]
            for suffix in ("", "_")
            if (name, suffix) != ("paged_caching", "")
        ],
    ),
    "lib._infinicore.RoPEAlgo": (None, lambda: [raw.RoPEAlgo.GPT_J, raw.RoPEAlgo.GPT_NEOX]),
    "lib._infinicore.DeviceEvent": (
        None,
        lambda: [raw.DeviceEvent(*given) for given in ((), (0x2,), (raw.Device(),), (raw.Device(), 0x2))],
    ),
    "lib._infinicore.Graph": (None, lambda: raw.Graph().run()),
}
CONTEXT = {
    "get_device": ("", lambda module: module.get_device()),
    "get_device_count": ("device_type", lambda module: module.get_device_count(device_type="cpu")),
    "set_device": ("device", lambda module: module.set_device(device=cpu)),
    "sync_stream": ("", lambda module: module.sync_stream()),
    "sync_device": ("", lambda module: module.sync_device()),
    "get_stream": ("", lambda module: module.get_stream()),
    "is_graph_recording": ("", lambda module: module.is_graph_recording()),
    "start_graph_recording": (
        "device=None",
        lambda module: [module.start_graph_recording(device=None), module.stop_graph_recording()],
    ),
    "stop_graph_recording": ("", lambda module: [module.start_graph_recording(), module.stop_graph_recording()]),
}
for name, (signature, call) in CONTEXT.items():
    NAMES[name] = signature, lambda call=call: call(ic)
    NAMES[f"context.{name}"] = signature, lambda call=call: call(ic.context)


def reached(name):
    thing = ic
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


def differences(thing, signature):
    """What a call by the documented signature would stumble over."""
    scope = {}
    exec(f"def documented({signature}): pass", scope)
    ours = inspect.signature(thing).parameters
    theirs = inspect.signature(scope["documented"]).parameters
    for place, (name, parameter) in enumerate(theirs.items()):
        own = ours.get(name)
        if own is None:
            yield f"{name} is missing"
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and list(ours)[place] != name:
            yield f"{name} stands elsewhere"
        elif own.kind is own.POSITIONAL_ONLY:
            yield f"{name} is positional only"
        elif own.default != parameter.default and name != "algo":
            yield f"{name} is {own.default} without an argument"
    for name, parameter in ours.items():
        if name not in theirs and parameter.default is parameter.empty and parameter.kind < parameter.VAR_POSITIONAL:
            yield f"{name} is required"


wrong = {}
for name, (signature, call) in NAMES.items():
    try:
        if name not in ("lib._infinicore.free functions", "lib._infinicore.ops"):
            reached(name)
        call()
        found = list(differences(reached(name), signature)) if signature is not None else []
    except Exception as error:  # all of them in one report
        found = [f"{type(error).__name__}: {error}"]
    if found:
        wrong[name] = found
show("names", [*NAMES, "ntops"])  # ntops is there only where it is installed: with_ntops.py
show("wrong", wrong)
