"""Python written on the binding itself: infinicore.lib._infinicore."""

import threading

import infinicore
import torch
from infinicore.lib import _infinicore
from infinicore.lib._infinicore import DataType, Device
from shown import show

kinds = [
    "BYTE",
    "BOOL",
    "I8",
    "I16",
    "I32",
    "I64",
    "U8",
    "U16",
    "U32",
    "U64",
    "F8",
    "F16",
    "F32",
    "F64",
    "C16",
    "C32",
    "C64",
    "C128",
    "BF16",
]
show("DataType", list(DataType.__members__)[: len(kinds)] == kinds or sorted(DataType.__members__) == sorted(kinds))
types = ["CPU", "NVIDIA", "CAMBRICON", "ASCEND", "METAX", "MOORE", "ILUVATAR", "QY", "KUNLUN", "HYGON", "COUNT"]
show("Device.Type", list(Device.Type.__members__))
show("types", types)
cpu = Device(Device.Type.CPU, 0)
show("Device", [Device().type == cpu.type, cpu.index, "CPU" in str(cpu).upper()])
torch.manual_seed(6)


def raw(tensor):
    return infinicore.from_torch(tensor)._underlying


def shown(name, tensor):
    show(name, infinicore.Tensor(tensor))


a, b = raw(torch.randn(3, 4)), raw(torch.randn(3, 4))
shown("a", a)
shown("b", b)
show(
    "about a",
    [list(a.shape), list(a.strides), a.ndim, a.numel(), a.size(1), a.stride(0), a.is_contiguous(), a.is_pinned()],
)
show("its dtype", [a.dtype == DataType.F32, a.device.type == Device.Type.CPU, isinstance(a.info(), str)])
shown("add", _infinicore.add(a, b))
c = _infinicore.empty([3, 4], DataType.F32, cpu)
_infinicore.add_(c, a, b)
shown("add_", c)
_infinicore.mul_(c, a, b)
shown("mul_", c)
w = raw(torch.randn(5, 4))
shown("w", w)
shown("linear", _infinicore.linear(a, w, None))
y = _infinicore.empty([3, 5], DataType.F32, cpu, False)
_infinicore.matmul_(y, a, w.permute([1, 0]), 0.5)
shown("matmul_", y)
n = raw(torch.rand(4))
shown("n", n)
shown("rms_norm", _infinicore.rms_norm(a, n, 1e-6))
_infinicore.rms_norm_(c, a, n, epsilon=1e-6)
shown("rms_norm_", c)
shown("silu", _infinicore.silu(a))
_infinicore.swiglu_(c, a, b)
shown("swiglu_", c)
shown("softmax", _infinicore.causal_softmax(a))
shown("ones", _infinicore.ones([2], DataType.I64, cpu))
memory = torch.arange(6.0)
shown("blob", _infinicore.from_blob(memory.data_ptr(), [2, 3], DataType.F32, cpu))
shown("strided", _infinicore.strided_from_blob(memory.data_ptr(), [3, 2], [1, 3], DataType.F32, cpu))
shown("view", a.view([12]).narrow(0, 2, 3))

# Graphs and threads: the lock is free while ops compute.
_infinicore.set_device(cpu)
_infinicore.start_graph_recording()
d = _infinicore.add(a, b)
graph = _infinicore.stop_graph_recording()
a.copy_(raw(torch.ones(3, 4)))
threads = [threading.Thread(target=graph.run) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
_infinicore.sync_device()
shown("replayed", d)
event = _infinicore.DeviceEvent()
event.record()
event.synchronize()
show("event", event.query())
show("RoPEAlgo", sorted(_infinicore.RoPEAlgo.__members__))
