"""Between infinicore, torch and numpy: dtypes by infinicore.utils, tensors by DLPack and numpy's protocol."""

import infinicore
import numpy as np
import torch
from infinicore.utils import (
    infinicore_to_numpy_dtype,
    numpy_to_infinicore_dtype,
    to_infinicore_dtype,
    to_torch_dtype,
)
from shown import show

common = ("float16", "float32", "bfloat16", "int8", "int16", "int32", "int64", "uint8")
show("torch's", {name: str(to_torch_dtype(getattr(infinicore, name))) for name in common})
show("ours", {name: repr(to_infinicore_dtype(getattr(torch, name))) for name in common})
numbers = [name for name in common if name != "bfloat16"] + ["float64"]
show("numpy's", {name: str(np.dtype(infinicore_to_numpy_dtype(getattr(infinicore, name)))) for name in numbers[:-1]})
show("of numpy", {name: repr(numpy_to_infinicore_dtype(np.dtype(name))) for name in numbers})
show("of numpy's types", repr(numpy_to_infinicore_dtype(np.float32)))
for name, call in {
    "to_torch_dtype": lambda: to_torch_dtype(infinicore.dtype(infinicore.lib._infinicore.DataType.C16)),
    "to_infinicore_dtype": lambda: to_infinicore_dtype(torch.quint8),
    "numpy_to_infinicore_dtype": lambda: numpy_to_infinicore_dtype(np.dtype("U4")),
    "infinicore_to_numpy_dtype": lambda: infinicore_to_numpy_dtype(infinicore.complex32),
}.items():
    try:
        call()
    except ValueError as caught:
        show(f"refused: {name}", str(caught).startswith("Unsupported"))

# A script's own way back: a torch tensor of the same memory, by its address.
x = torch.randn(3, 4)
y = infinicore.from_torch(x)
back = torch.empty(y.shape, dtype=to_torch_dtype(y.dtype))
infinicore.from_torch(back).copy_(y)
show("there and back", bool(torch.equal(x, back)))
shared = torch.from_dlpack(y)
shared[0, 0] = 7
show("one memory", [float(x[0, 0]), shared.data_ptr() == y.data_ptr()])
array = np.asarray(y)
show("an array", [array.shape == (3, 4), float(array[0, 0]), array.dtype == np.float32])
show("numpy by DLPack", bool(np.array_equal(np.from_dlpack(y), x.numpy())))
turned = infinicore.from_torch(x.t())
show("strides", [turned.shape, turned.stride(), list(np.asarray(turned).shape)])
show("turned", bool(torch.equal(torch.from_dlpack(turned), x.t())))
