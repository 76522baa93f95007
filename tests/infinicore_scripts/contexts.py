"""The context: devices of a thread, streams, synchronisation, events."""

import threading
import time

import infinicore
import torch
from infinicore import DeviceEvent, context
from shown import show

cpu = infinicore.device("cpu")
infinicore.set_device(cpu)
here = infinicore.get_device()
show("raw", isinstance(here, infinicore.lib._infinicore.Device))
show("is a CPU", here.type == infinicore.lib._infinicore.Device.Type.CPU and here.index == 0)
show("as a device", infinicore.device._from_infinicore_device(here) == cpu)
show("CPUs", [infinicore.get_device_count("cpu"), context.get_device_count("cpu")])
show("same functions", [getattr(infinicore, name) is getattr(context, name) for name in ("get_device", "sync_stream")])

x = infinicore.from_torch(torch.randn(64, 64))
for _ in range(3):
    x = infinicore.nn.functional.silu(x)
show("synchronised", [infinicore.sync_stream(), infinicore.sync_device(), context.sync_stream(), context.sync_device()])
infinicore.lib._infinicore.sync_stream()
infinicore.lib._infinicore.sync_device()
stream = infinicore.get_stream()
show("a stream", type(stream).__name__ in ("PyCapsule", "int", "NoneType"))


def elsewhere():
    context.set_device(infinicore.device("cpu", 0))
    found.append(context.get_device().index)
    found.append(infinicore.nn.functional.silu(infinicore.ones([2], dtype=infinicore.float32, device=cpu)))


found = []
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
show("of another thread", found[0])
show("computed there", found[1])

# ---- events ----

start, end = DeviceEvent(enable_timing=True), DeviceEvent(enable_timing=True, device=cpu)
show("not recorded", [start.is_recorded, start.enable_timing, start.device == cpu])
start.record()
time.sleep(0.02)
infinicore.nn.functional.silu(x)
end.record()
end.synchronize()
elapsed = start.elapsed_time(end)
show("milliseconds", 15 < elapsed < 20000)
show("recorded", [start.is_recorded, end.query()])
start.wait()
plain = DeviceEvent()
plain.record(stream) if stream is not None else plain.record()
plain.synchronize()
show("without timing", [plain.query(), plain.enable_timing])
try:
    start.elapsed_time(plain)
except RuntimeError as caught:
    show("refused: elapsed_time", bool(str(caught)))
