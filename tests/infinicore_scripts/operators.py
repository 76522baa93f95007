"""The ops of the top level, with and without out=."""

import infinicore as ic
import torch
from shown import show

cpu = ic.device("cpu")
torch.manual_seed(2)


def new(name, *shape, dtype=torch.float32):
    tensor = ic.from_torch(torch.randn(*shape).to(dtype))
    show(name, tensor)
    return tensor


for dtype in (torch.float32, torch.float16, torch.bfloat16):
    kind = str(dtype).removeprefix("torch.")
    a, b = new(f"a {kind}", 5, 8, dtype=dtype), new(f"b {kind}", 5, 8, dtype=dtype)
    show(f"add {kind}", ic.add(a, b))
    show(f"mul {kind}", ic.mul(a, b))
    out = ic.empty([5, 8], dtype=a.dtype, device=cpu)
    returned = ic.add(a, b, out=out)
    show(f"add out {kind}", out)
    show(f"returned {kind}", returned is None or returned.data_ptr() == out.data_ptr())
    ic.mul(a, b, out=a)  # over its input
    show(f"mul over a {kind}", a)
    m, n = new(f"m {kind}", 4, 8, dtype=dtype), new(f"n {kind}", 8, 6, dtype=dtype)
    show(f"matmul {kind}", ic.matmul(m, n))
    show(f"matmul alpha {kind}", ic.matmul(m, n, alpha=0.5))
    product = ic.empty([4, 6], dtype=m.dtype, device=cpu)
    ic.matmul(m, n, out=product)
    show(f"matmul out {kind}", product)
    p, q = new(f"p {kind}", 3, 4, 8, dtype=dtype), new(f"q {kind}", 3, 8, 2, dtype=dtype)
    show(f"batched {kind}", ic.matmul(p, q))
    w = new(f"w {kind}", 8, dtype=dtype)
    c, d = new(f"c {kind}", 5, 8, dtype=dtype), new(f"d {kind}", 5, 8, dtype=dtype)
    y, residual = ic.add_rms_norm(c, d, w, 1e-6)
    show(f"add_rms_norm {kind}", y)
    show(f"its sum {kind}", residual)
    y_, residual_ = ic.empty_like(c), ic.empty_like(c)
    show(f"add_rms_norm_ returns {kind}", ic.add_rms_norm_(y_, residual_, c, d, w, epsilon=1e-6))
    show(f"add_rms_norm_ {kind}", y_)
    show(f"its sum_ {kind}", residual_)

# Another layout of the same elements. InfiniCore asks for an argument that it does not read.
x = new("x", 3, 4, 5)
turned = x.permute([2, 1, 0])
show("rearranged", ic.rearrange(turned, turned))
target = ic.empty(turned.shape, dtype=ic.float32, device=cpu)
ic.rearrange(turned, turned, out=target)
show("rearranged out", target)
show("narrowed", ic.narrow(x, 1, 1, 2))

# ---- attention over a cache: a prompt of 3, then one token ----

k_cache, v_cache = (ic.zeros((2, 16, 32), dtype=ic.float32, device=cpu) for _ in range(2))
for step, (pos, length) in enumerate([(0, 3), (3, 1)]):
    q, k, v = (new(f"{name} {step}", heads, length, 32) for name, heads in (("aq", 8), ("ak", 2), ("av", 2)))
    show(f"attention {step}", ic.attention(q, k, v, k_cache, v_cache, pos))
show("k_cache", k_cache)
show("v_cache", v_cache)

# ---- paged: two requests of 5 and 2 tokens, then a token of each ----

blocks, block_size, heads, kv_heads, dim = 6, 4, 4, 2, 16
pk, pv = (ic.zeros([blocks, kv_heads, block_size, dim], dtype=ic.float32, device=cpu) for _ in range(2))
tables = ic.from_list([[4, 1], [2, -1]], dtype=ic.int64)
show("tables", tables)
k, v, q = new("pk", 7, kv_heads, dim), new("pv", 7, kv_heads, dim), new("pq", 7, heads, dim)
slots = ic.from_list([16, 17, 18, 19, 4, 8, 9], dtype=ic.int64)
written = ic.paged_caching(pk, pv, k, v, slots)
show("caches are returned", [written[0].data_ptr() == pk.data_ptr(), written[1].data_ptr() == pv.data_ptr()])
show("paged cache", pk)
total, offsets = ic.from_list([5, 2], dtype=ic.int64), ic.from_list([0, 5, 7], dtype=ic.int64)
show("prefill", ic.paged_attention_prefill(q, pk, pv, tables, total, offsets, None, 0.25))
k1, v1, q1 = new("pk1", 2, kv_heads, dim), new("pv1", 2, kv_heads, dim), new("pq1", 2, heads, dim)
ic.paged_caching(pk, pv, k1, v1, ic.from_list([5, 10], dtype=ic.int64))
decoded = ic.empty([2, heads, dim], dtype=ic.float32, device=cpu)
ic.paged_attention(q1, pk, pv, tables, ic.from_list([6, 3], dtype=ic.int64), None, 0.25, out=decoded)
show("decode", decoded)

refused = {
    "shapes": lambda: ic.add(new("r1", 2, 3), new("r2", 3, 2)),
    "dtypes": lambda: ic.add(new("r3", 2, 3), new("r4", 2, 3, dtype=torch.float16)),
    "products": lambda: ic.matmul(new("r5", 2, 3), new("r6", 2, 3)),
    "too far": lambda: ic.attention(
        new("r7", 8, 4, 32), new("r8", 2, 4, 32), new("r9", 2, 4, 32), k_cache, v_cache, 14
    ),
}
for name, call in refused.items():
    try:
        call()
    except RuntimeError as caught:
        show(f"refused: {name}", bool(str(caught)))
