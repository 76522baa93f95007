"""Recording of graphs: start and stop, `with`, replays on other values, what a recording leaves behind."""

import threading

import infinicore as ic
import torch
from shown import show

cpu = ic.device("cpu")
F = ic.nn.functional
torch.manual_seed(3)


def new(*shape):
    return ic.from_torch(torch.randn(*shape))


ic.set_device(cpu)
show("before", ic.is_graph_recording())

# Recorded on memory that nobody has filled: a graph's ops do not run while they are noted.
x = ic.empty([4, 8], dtype=ic.float32, device=cpu)
ids = ic.empty([3], dtype=ic.int64, device=cpu)
ids.copy_(ic.from_list([10**12, -5, 10**12], dtype=ic.int64))
weight, table, norm = new(6, 8), new(10, 8), new(8)
for name, tensor in (("weight", weight), ("table", table), ("norm", norm)):
    show(name, tensor)

ic.start_graph_recording()
show("during", ic.is_graph_recording())
hidden = F.rms_norm(ic.add(x, x), [8], norm, 1e-6)
y = F.silu(F.linear(hidden, weight))
z = ic.matmul(hidden, weight.permute([1, 0]), alpha=2.0)
rows = F.embedding(ids, table)
graph = ic.stop_graph_recording()
show("after", [ic.is_graph_recording(), isinstance(graph, ic.graph.Graph)])

for step in range(3):
    x.copy_(new(4, 8))
    ids.copy_(ic.from_list([step, 9 - step, 5], dtype=ic.int64))
    show(f"x {step}", x)
    graph.run()
    ic.sync_stream()
    show(f"y {step}", y)
    show(f"z {step}", z)
    show(f"rows {step}", rows)

x.copy_(new(4, 8))
show("x thread", x)
thread = threading.Thread(target=graph.run)
thread.start()
thread.join()
show("y thread", y)

# ---- document 004's example, with the product that it leaves out ----

ic.context.start_graph_recording()
input1 = ic.zeros([128, 256], dtype=ic.float32, device=cpu)
input2 = ic.ones([256, 128], dtype=ic.float32, device=cpu)
product = ic.matmul(input1, input2)
repeated = ic.context.stop_graph_recording()
for _ in range(100):
    repeated.run()
show("the document's product", product.view([128 * 128]).narrow(0, 0, 4))

# ---- with ----

with ic.graph() as step:
    out = F.swiglu(x, x)
x.copy_(new(4, 8))
show("x with", x)
step.run()
show("out with", out)

# ---- ops in place: a sum that grows with each replay ----

total = ic.zeros([3], dtype=ic.float32, device=cpu)
one = ic.ones([3], dtype=ic.float32, device=cpu)
ic.start_graph_recording(cpu)
total += one
counting = ic.stop_graph_recording()
show("nothing yet", total)
for _ in range(5):
    counting.run()
show("counted", total)

# ---- an error between start and stop ----

try:
    with ic.graph():
        F.linear(x, new(3, 5))
except RuntimeError as caught:
    show("refused: shapes", bool(str(caught)))
show("not recording", ic.is_graph_recording())
ic.start_graph_recording()
try:
    ic.start_graph_recording()
except RuntimeError as caught:
    show("refused: twice", bool(str(caught)))
ic.stop_graph_recording()
try:
    ic.stop_graph_recording()
except RuntimeError as caught:
    show("refused: stop", bool(str(caught)))
try:
    ic.graph.Graph("no graph")
except TypeError as caught:
    show("refused: a graph", bool(str(caught)))
