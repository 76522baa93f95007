"""infinicore.nn: a small transformer block of one's own, its state, and the four modules alone."""

import infinicore
import torch
from infinicore import nn
from infinicore.nn import functional as F
from shown import show

cpu = infinicore.device("cpu")
torch.manual_seed(4)


class MLP(nn.Module):
    def __init__(self, hidden, inner, **kwargs):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False, **kwargs)
        self.up_proj = nn.Linear(hidden, inner, bias=False, **kwargs)
        self.down_proj = nn.Linear(inner, hidden, bias=True, **kwargs)

    def forward(self, x):
        return self.down_proj(F.swiglu(self.up_proj(x), self.gate_proj(x)))


class Block(nn.Module):
    def __init__(self, hidden, inner, **kwargs):
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-5, **kwargs)
        self.mlp = MLP(hidden, inner, **kwargs)
        self.register_buffer("scale", infinicore.ones([hidden], dtype=infinicore.float32, device=cpu))

    def forward(self, x):
        return infinicore.add(x, self.mlp(self.norm(x)))


class Model(nn.Module):
    def __init__(self, layers, hidden, inner, **kwargs):
        super().__init__()
        self.embed = nn.Embedding(20, hidden, **kwargs)
        self.layers = nn.ModuleList([Block(hidden, inner, **kwargs) for _ in range(layers)])
        self.head = nn.Parameter(infinicore.empty([7, hidden], dtype=infinicore.float32, device=cpu))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.head)


model = Model(2, 8, 12, device=cpu, dtype=infinicore.float32)
names = sorted(model.state_dict())
show("names", names)
show("parameters", sorted(name for name, _ in model.named_parameters()))
show("buffers", sorted(name for name, _ in model.named_buffers()))
show("children", [name for name, _ in model.named_children()])
show("modules", sorted(name for name, _ in model.named_modules()))
show(
    "counts", [len(list(model.parameters())), len(list(model.buffers())), len(list(model.modules())), len(model.layers)]
)
show("list", [isinstance(model.layers[0], Block), model.layers[-1] is model.layers[1], len(model.layers[:1])])

state = {name: infinicore.from_torch(torch.randn(tensor.shape)) for name, tensor in model.state_dict().items()}
before = model.head.data_ptr()
model.load_state_dict(state, strict=True)
show("copied into place", model.head.data_ptr() == before)
for name, tensor in model.state_dict().items():
    show(name, tensor)
ids = infinicore.from_list([[3, 0, 19], [5, 5, 1]], dtype=infinicore.int64)
show("logits", model(ids))
show("eval", [model.eval() is None or isinstance(model.eval(), nn.Module), model.training])

missing = dict(list(state.items())[1:])
try:
    model.load_state_dict(missing)
except RuntimeError as caught:
    show("refused: missing", names[0] in str(caught) or list(state)[0] in str(caught))
try:
    model.load_state_dict({**state, "more": state[names[0]]}, strict=True)
except RuntimeError as caught:
    show("refused: surplus", "more" in str(caught))
model.load_state_dict(missing, strict=False)

# A plain tensor may take a parameter's place.
model.head = infinicore.nn.Parameter(infinicore.ones([7, 8], dtype=infinicore.float32, device=cpu))
model.layers.append(Block(8, 12, device=cpu, dtype=infinicore.float32))
show("appended", len(model.layers))

# ---- one by one ----

linear = nn.Linear(6, 4)
show("linear", [linear.weight.shape, linear.bias is None, repr(linear.weight.dtype), str(linear.weight.device)])
linear = nn.Linear(6, 4, bias=True, dtype=infinicore.float32, device=cpu)
for name, parameter in linear.named_parameters():
    parameter.copy_(infinicore.from_torch(torch.randn(parameter.shape)))
    show(f"linear {name}", parameter)
x = infinicore.from_torch(torch.randn(3, 6))
show("linear x", x)
show("linear y", linear(x))

norm = nn.RMSNorm([8], eps=1e-6, dtype=infinicore.float32)
norm.weight.copy_(infinicore.from_torch(torch.rand(8)))
show("norm weight", norm.weight)
x = infinicore.from_torch(torch.randn(2, 3, 8))
show("norm x", x)
show("norm y", norm(x))

rope = nn.RoPE(max_position_embeddings=32, rope_theta=10000.0, head_dim=8, device=cpu, dtype=infinicore.float32)
states = infinicore.from_torch(torch.randn(1, 3, 2, 8))
show("rope x", states)
turned = rope(states, infinicore.from_list([[4, 5, 6]], dtype=infinicore.int64))
show("rope y", turned)
show("rope in place", turned.data_ptr() == states.data_ptr())
gptj = infinicore.from_torch(torch.randn(1, 3, 2, 8))
show("gptj x", gptj)
show("gptj y", rope(gptj, infinicore.from_list([[4, 5, 6]], dtype=infinicore.int64), algo=F.RopeAlgo.GPT_J))

try:
    nn.Parameter([1, 2])
except ValueError as caught:
    show("refused: parameter", bool(str(caught)))
show("a tensor too", isinstance(nn.Parameter(x), infinicore.Tensor))
