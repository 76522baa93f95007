"""The end-to-end example of the document; the device is the first argument, "cuda:0" without one."""

import sys

import infinicore as ic

device = ic.device(sys.argv[1] if len(sys.argv) > 1 else "cuda:0")

q = ic.empty((8, 1, 128), dtype=ic.float16, device=device)
k = ic.empty((2, 1, 128), dtype=ic.float16, device=device)
v = ic.empty((2, 1, 128), dtype=ic.float16, device=device)
k_cache = ic.empty((2, 128, 128), dtype=ic.float16, device=device)
v_cache = ic.empty((2, 128, 128), dtype=ic.float16, device=device)
for number, tensor in enumerate((q, k, v), start=1):  # the example leaves them as they are
    tensor.copy_(ic.from_list([[[number / 4] * 128]] * tensor.shape[0], dtype=ic.float16).to(device))

out = ic.attention(q, k, v, k_cache, v_cache, pos=0)

if ic.use_ntops:
    out = ic.nn.functional.silu(out)

out.debug()
print("shape", out.shape, out.dtype, out.device)
