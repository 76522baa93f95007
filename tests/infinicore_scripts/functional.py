"""infinicore.nn.functional: each of the eight functions, with and without out=."""

import infinicore as ic
import infinicore.nn.functional as F
import torch
from shown import show

cpu = ic.device("cpu")
torch.manual_seed(5)


def new(name, *shape, dtype=torch.float32):
    tensor = ic.from_torch(torch.randn(*shape).to(dtype))
    show(name, tensor)
    return tensor


for dtype in (torch.float32, torch.float16, torch.bfloat16):
    kind = str(dtype).removeprefix("torch.")
    scores = new(f"scores {kind}", 2, 3, 5, dtype=dtype)
    show(f"causal_softmax {kind}", F.causal_softmax(scores))
    F.causal_softmax(scores, scores)  # `out` by position, over the input
    show(f"causal_softmax over {kind}", scores)
    x, w = new(f"x {kind}", 4, 8, dtype=dtype), new(f"w {kind}", 8, dtype=dtype)
    show(f"rms_norm {kind}", F.rms_norm(x, w.shape, w))
    show(f"rms_norm eps {kind}", F.rms_norm(x, normalized_shape=[8], weight=w, eps=0.5))
    show(f"silu {kind}", F.silu(x))
    up, gate = new(f"up {kind}", 4, 8, dtype=dtype), new(f"gate {kind}", 4, 8, dtype=dtype)
    show(f"swiglu {kind}", F.swiglu(up, gate))
    weight, bias = new(f"weight {kind}", 6, 8, dtype=dtype), new(f"bias {kind}", 6, dtype=dtype)
    show(f"linear {kind}", F.linear(x, weight))
    show(f"linear bias {kind}", F.linear(x, weight, bias=bias))
    out = ic.empty([4, 6], dtype=x.dtype, device=cpu)
    F.linear(x, weight, bias, out=out)
    show(f"linear out {kind}", out)
    out = ic.empty_like(x)
    F.swiglu(up, gate, out=out)
    show(f"swiglu out {kind}", out)
    F.rms_norm(x, [8], w, 1e-6, out=out)
    show(f"rms_norm out {kind}", out)
    F.silu(x, inplace=True)
    show(f"silu in place {kind}", x)
    table = new(f"table {kind}", 10, 8, dtype=dtype)
    show(f"embedding {kind}", F.embedding(ic.from_list([[1, 9], [0, 4]], dtype=ic.int64), table))
    out = ic.empty([3, 8], dtype=table.dtype, device=cpu)
    F.embedding(ic.from_list([7, 7, 2], dtype=ic.int32), table, out=out)
    show(f"embedding out {kind}", out)
w32 = new("w32", 8)
x16 = new("x16", 4, 8, dtype=torch.bfloat16)
show("rms_norm of both", F.rms_norm(x16, [8], w32))

# ---- rope: tables of sines and cosines, both ways to pair ----

angles = torch.outer(torch.arange(16.0), 10000 ** -(torch.arange(0, 8, 2) / 8))
sin, cos = ic.from_torch(angles.sin()), ic.from_torch(angles.cos())
show("sin", sin)
show("cos", cos)
pos = ic.from_list([3, 0, 15], dtype=ic.int64)
x = new("rope x", 3, 2, 8)
show("rope", F.rope(x, pos, sin, cos))
show("rope neox", F.rope(x, pos, sin, cos, F.RopeAlgo.GPT_NEOX))
show("rope gptj", F.rope(x, pos, sin, cos, algo=F.RopeAlgo.GPT_J))
F.rope(x, ic.from_list([3, 0, 15], dtype=ic.int32), sin, cos, out=x)
show("rope over", x)

# ---- sampling with a number of the caller's ----

logits = new("logits", 50)
sampled = {}
for random_val, topp, topk, temperature in [
    (0.0, 1.0, 50, 1.0),
    (0.3, 1.0, 1, 1.0),
    (0.3, 0.0, 50, 1.0),
    (0.3, 1.0, 50, 0.0),
    (0.1, 0.8, 10, 0.7),
    (0.5, 0.9, 50, 1.3),
    (0.99, 1.0, 50, 1.0),
]:
    token = F.random_sample(logits, random_val, topp, topk, temperature)
    show(f"sample {random_val} {topp} {topk} {temperature}", token)
token = ic.empty([], dtype=ic.int64, device=cpu)
F.random_sample(logits, 0.5, 0.9, 50, 1.3, out=token)
show("sample out", token)
try:
    F.rms_norm(x, [4], w32)
except AssertionError:
    show("refused: normalized_shape", True)
except (RuntimeError, ValueError):
    show("refused: normalized_shape", False)
