"""The methods of Tensor: what it says of itself, views, copies, operators, debug."""

import os
import sys
import tempfile

import infinicore
import torch
from shown import show

cpu = infinicore.device("cpu")
torch.manual_seed(1)


def new(*shape):
    return infinicore.from_torch(torch.randn(*shape))


x = new(2, 3, 4)
show("x", x)
show("about x", [x.shape, x.size(), x.size(1), x.stride(), x.stride(0), x.ndim, x.numel(), x.is_contiguous()])
show("shape is a list", x.shape == [2, 3, 4] and isinstance(x.shape, list))
show("its dtype and device", [x.dtype == infinicore.float32, x.device == cpu, str(x.device)])
show("an element each", [len({x, x}), x in {x}])

# ---- views: the same memory ----

views = {
    "permute": x.permute([2, 0, 1]),
    "view": x.view([6, 4]),
    "view as one": x.view([24]),
    "as_strided": x.as_strided([2, 4], [12, 1]),
    "narrow": x.narrow(1, 1, 2),
    "unsqueeze": x.unsqueeze(1),
    "squeeze": x.unsqueeze(1).squeeze(1),
    "top narrow": infinicore.narrow(x, 2, 1, 3),
    "top unsqueeze": infinicore.unsqueeze(x, 0),
    "top squeeze": infinicore.squeeze(new(1, 3), 0),
}
for name, view in views.items():
    show(name, view)
show("at the same address", [views[name].data_ptr() - x.data_ptr() for name in ("permute", "view", "narrow")])
show("contiguous views", {name: view.is_contiguous() for name, view in views.items()})
views["narrow"].copy_(infinicore.zeros([2, 2, 4], dtype=infinicore.float32, device=cpu))
show("x after a write through a view", x)

# ---- copies ----

permuted = x.permute([1, 2, 0])
straight = permuted.contiguous()
show("made contiguous", straight)
show("is its own", straight.data_ptr() != x.data_ptr())
show("already contiguous", x.contiguous().data_ptr() == x.data_ptr())
show("to where it is", x.to(cpu).data_ptr() == x.data_ptr())
target = infinicore.strided_empty([3, 4, 2], [1, 3, 12], dtype=infinicore.float32, device=cpu)
show("copy_ returns", target.copy_(permuted))
show("copied between layouts", target)

# ---- operators ----

a, b = new(4, 5), new(4, 5)
show("a", a)
show("b", b)
show("a + b", a + b)
show("a * b", a * b)
show("a @ b'", a @ b.permute([1, 0]))
c = new(4, 5)
c.copy_(a)
kept = c
c += b
show("c += b", c)
show("in place", kept is c or kept.data_ptr() == c.data_ptr())

# ---- a method of one's own, as model code adds it ----

infinicore.Tensor.rows = lambda self: self.size(0)
show("a method of one's own", x.rows())
del infinicore.Tensor.rows

# ---- debug ----

sys.stdout.flush()
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "tensor.bin")
    a.debug(path)
    with open(path, "rb") as file:
        show("debug to a file", torch.frombuffer(bytearray(file.read()), dtype=torch.float32).tolist())
a.debug()
sys.stdout.flush()

refused = {
    "view of other size": lambda: x.view([5, 5]),
    "view that strides forbid": lambda: permuted.view([24]),
    "narrow out of range": lambda: x.narrow(1, 2, 2),
    "squeeze of 3": lambda: x.squeeze(1),
    "copy of another shape": lambda: a.copy_(x),
}
for name, call in refused.items():
    try:
        call()
    except RuntimeError as caught:
        show(f"refused: {name}", bool(str(caught)))
