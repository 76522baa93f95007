"""Devices, dtypes and every constructor of tensors."""

import ctypes

import infinicore as ic
import numpy as np
import torch
from shown import show

# ---- devices ----

cpu = ic.device("cpu")
same = [ic.device(), ic.device("cpu", 0), ic.device("cpu:0"), ic.device(cpu), ic.device(type="cpu", index=0)]
show("devices are equal", [device == cpu for device in same])
show("cuda", [ic.device("cuda:1").type, ic.device("cuda:1").index, ic.device("cuda", 1) == ic.device("cuda:1")])
show("cpu is cuda", cpu == ic.device("cuda:0"))
try:
    ic.device("cuda:0", 0)
except ValueError:
    show("index twice", "ValueError")

# ---- dtypes ----

names = [
    "float32",
    "float",
    "float64",
    "double",
    "complex32",
    "chalf",
    "complex64",
    "cfloat",
    "complex128",
    "cdouble",
    "float16",
    "half",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "short",
    "int32",
    "int",
    "int64",
    "long",
    "bool",
]
show("dtypes", {name: repr(getattr(ic, name)) for name in names})
show("a dict's key", {ic.half: "found"}[ic.float16])
show("are dtypes", all(isinstance(getattr(ic, name), ic.dtype) for name in names))
show("built from the enum", ic.dtype(ic.lib._infinicore.DataType.F16) == ic.float16)

# ---- the document's lines ----

a = ic.empty((4, 8), dtype=ic.float16, device=cpu)
b = ic.ones((4, 8), dtype=ic.float16, device=cpu)
a.copy_(b)
show("copied", a)
for name in ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8"):
    show(f"zeros {name}", ic.zeros([2, 3], dtype=getattr(ic, name), device=cpu))
    show(f"ones {name}", ic.ones([2, 3], dtype=getattr(ic, name), device=cpu))
show("zero-dimensional", ic.ones([], dtype=ic.float32, device=cpu))
show("nothing in it", ic.zeros([0, 3], dtype=ic.float32, device=cpu))
pinned = ic.empty([16], dtype=ic.float32, device=cpu, pin_memory=False)
show("pinned", pinned.is_pinned())

# ---- like another, strided ----

like = ic.empty_like(a)
show("like", [like.shape, like.stride(), repr(like.dtype), like.data_ptr() != a.data_ptr()])
other = ic.empty_like(a, dtype=ic.int32, device=cpu)
show("like, but for", [other.shape, repr(other.dtype)])
strided = ic.strided_empty([3, 4], [1, 3], dtype=ic.float32, device=cpu)
strided.copy_(ic.from_torch(torch.arange(12.0).view(3, 4)))
show("strided", strided)

# ---- from memory of one's own ----

array = np.arange(24, dtype=np.float32)
blob = ic.from_blob(array.ctypes.data, [2, 12], dtype=ic.float32, device=cpu)
array[0] = 100  # the same memory
show("blob", blob)
show("strided blob", ic.strided_from_blob(array.ctypes.data, [3, 4], [1, 6], dtype=ic.float32, device=cpu))
buffer = (ctypes.c_int64 * 4)(1, 2, 3, 4)
show("ctypes", ic.from_blob(ctypes.addressof(buffer), [4], dtype=ic.int64, device=cpu))

# ---- from torch, numpy and lists ----

t = torch.arange(6.0).view(2, 3)
shared = ic.from_torch(t)
t[1, 2] = -1
show("torch", shared)
show("torch's memory", shared.data_ptr() == t.data_ptr())
show("torch transposed", ic.from_torch(t.t()))
for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
    show(f"torch {dtype}", ic.from_torch(torch.arange(5).to(dtype)))
copied = np.arange(6, dtype=np.int32).reshape(3, 2)
from_numpy = ic.from_numpy(copied)
copied[:] = 0
show("numpy", from_numpy)
show("numpy as half", ic.from_numpy(np.array([0.5, 1.5]), dtype=ic.float16, device=cpu))
show("numpy as bfloat16", ic.from_numpy(np.array([0.5, 1.5], dtype=np.float32), dtype=ic.bfloat16))
show("list", ic.from_list([[1.5, 2.5], [3.5, 4.5]]))
show("list of integers", ic.from_list([1, 2, 3]))
show("list as int32", ic.from_list([1, 2, 3], dtype=ic.int32, device=cpu))
show("tuple", ic.from_list(((1, 2), (3, 4)), dtype=ic.float32))

refused = {
    "numpy of a list": (lambda: ic.from_numpy([1, 2]), TypeError),
    "numpy of nothing": (lambda: ic.from_numpy(np.empty([0])), ValueError),
    "list of an array": (lambda: ic.from_list(np.ones(2)), TypeError),
    "list of nothing": (lambda: ic.from_list([]), ValueError),
}
for name, (call, error) in refused.items():
    try:
        call()
    except error as caught:
        show(f"refused: {name}", bool(str(caught)))
