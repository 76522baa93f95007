"""use_ntops and infinicore.ntops, as the document has them."""

import infinicore as ic

x = ic.ones([2, 3], dtype=ic.float32, device=ic.device("cpu"))
print("use_ntops", ic.use_ntops)
print("has ntops", hasattr(ic, "ntops"))
if ic.use_ntops:
    print("module", ic.ntops.__name__, ic.ntops.torch.silu.__globals__["torch"] is ic)
ic.nn.functional.silu(x)  # on the CPU never ntops'
ic.use_ntops = False
y = ic.nn.functional.silu(x, out=ic.empty_like(x))
print("switched off", ic.use_ntops)
y.debug()
