"""infinicore.nn: registration, walks, state_dict and its loading, the list, and the layers against torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torch_infini.compat.infinicore as ic

nn = ic.nn
CPU = ic.device("cpu")


def ours(*shape: int, seed: int = 0) -> ic.Tensor:
    return ic.from_torch(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def theirs(tensor: Any) -> torch.Tensor:
    return torch.from_dlpack(tensor)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4, bias=True)
        self.scale = 0.5
        self.register_buffer("mask", ours(4, 4))
        self.register_buffer("scratch", ours(2), persistent=False)

    def forward(self, x: ic.Tensor) -> ic.Tensor:
        return self.q(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([Attention() for _ in range(2)])
        self.norm = nn.RMSNorm(4)
        self.gain = nn.Parameter(ours(3))
        self.register_parameter("nothing", None)


KEYS = [
    *("gain", "embed.weight"),
    *(f"layers.{i}.{name}" for i in range(2) for name in ("mask", "q.weight", "q.bias")),
    "norm.weight",
]


# ---- registration ----


def test_what_is_assigned_is_registered() -> None:
    model = Model()
    assert list(model._parameters) == ["gain", "nothing"] and list(model._modules) == ["embed", "layers", "norm"]
    assert model.gain is model._parameters["gain"] and model.nothing is None
    assert model.layers[0].scale == 0.5
    assert {"gain", "embed", "layers"} <= set(dir(model))
    plain = ours(3)
    model.gain = plain  # a registered name takes a plain tensor too
    assert model._parameters["gain"] is plain
    model.gain = None
    assert model.gain is None
    model.table = plain  # which elsewhere is an attribute like any other
    assert "table" not in model._buffers and model.table is plain
    with pytest.raises(TypeError, match='"gain" must be an infinicore Tensor or None, got 3'):
        model.gain = 3
    with pytest.raises(TypeError, match='"norm" must be an infinicore Module or None'):
        model.norm = plain
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'absent'"):
        _ = model.absent


def test_a_name_changes_its_kind() -> None:
    module = nn.Module()
    module.x = 3
    module.x = nn.Parameter(ours(2))
    assert "x" not in module.__dict__ and "x" in module._parameters
    module.x = nn.Linear(2, 2)
    assert "x" not in module._parameters and "x" in module._modules
    del module.x
    assert not hasattr(module, "x")
    module.register_buffer("b", ours(2), persistent=False)
    module.b = ours(3)
    assert module.b.shape == [3] and list(module.state_dict()) == []
    del module.b
    module.register_buffer("b", None)
    assert list(module.named_buffers()) == []


@pytest.mark.parametrize("register", ["register_buffer", "register_parameter", "add_module"])
def test_wrong_registrations(register: str) -> None:
    module = nn.Module()
    value: Any = nn.Module() if register == "add_module" else ours(2)
    function = getattr(module, register)
    for name in ("", "a.b"):
        with pytest.raises(KeyError, match='name must not be empty or have a "."'):
            function(name, value)
    with pytest.raises(TypeError, match="name must be a str, got 3"):
        function(3, value)
    with pytest.raises(KeyError, match='the attribute "forward" exists already'):
        function("forward", value)
    with pytest.raises(TypeError, match='"x" must be an infinicore .* or None, got 3'):
        function("x", 3)


def test_init_comes_first() -> None:
    class Hasty(nn.Module):
        def __init__(self) -> None:
            self.x = nn.Parameter(ours(2))

    with pytest.raises(AttributeError, match=r'Module.__init__\(\) must be called before "x" is assigned'):
        Hasty()


def test_forward_is_asked_for() -> None:
    with pytest.raises(NotImplementedError, match="Module defines no forward"):
        nn.Module()()
    with pytest.raises(NotImplementedError, match="call its modules"):
        nn.ModuleList()()


# ---- walks ----


def test_walks() -> None:
    model = Model()
    modules = dict(model.named_modules())
    assert list(modules) == ["", "embed", "layers", "layers.0", "layers.0.q", "layers.1", "layers.1.q", "norm"]
    assert list(model.modules()) == list(modules.values())
    assert [name for name, _ in model.named_children()] == ["embed", "layers", "norm"] == [*model._modules]
    assert [type(child).__name__ for child in model.children()] == ["Embedding", "ModuleList", "RMSNorm"]
    parameters = [name for name, _ in model.named_parameters()]
    assert parameters == [key for key in KEYS if not key.endswith("mask")]
    assert [name for name, _ in model.named_parameters(recurse=False)] == ["gain"]
    assert [name for name, _ in model.named_parameters(prefix="m", recurse=False)] == ["m.gain"]
    assert len(list(model.parameters())) == len(parameters)
    buffers = [name for name, _ in model.named_buffers()]
    assert buffers == [f"layers.{i}.{name}" for i in range(2) for name in ("mask", "scratch")]
    assert len(list(model.buffers())) == 4
    assert model.get_submodule("layers.1.q") is model.layers[1].q and model.get_submodule("") is model
    assert model.get_parameter("layers.1.q.bias") is model.layers[1].q.bias
    assert model.get_buffer("layers.0.mask") is model.layers[0].mask
    for wrong in (
        lambda: model.get_submodule("layers.2"),
        lambda: model.get_parameter("layers.1.q.scale"),
        lambda: model.get_buffer("gain"),
    ):
        with pytest.raises(AttributeError, match="there is no"):
            wrong()


def test_what_has_two_names_comes_once() -> None:
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 3), nn.Linear(2, 3)
    model.b.weight = model.a.weight
    model.c = model.a
    assert [name for name, _ in model.named_parameters()] == ["a.weight", "b.weight"][:1]
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == ["a.weight", "b.weight", "c.weight"]
    assert [name for name, _ in model.named_modules()] == ["", "a", "b"]
    assert [name for name, _ in model.named_children()] == ["a", "b"]
    assert list(model.state_dict()) == ["a.weight", "b.weight", "c.weight"]


def test_against_torch_nn() -> None:
    """The names and orders of torch.nn.Module for the same tree."""

    class Theirs(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(7, 4)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
            self.gain = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("mask", torch.ones(2))

    class Ours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.layers = nn.ModuleList([nn.Linear(4, 4, bias=True) for _ in range(2)])
            self.gain = nn.Parameter(ours(3))
            self.register_buffer("mask", ours(2))

    a, b = Theirs(), Ours()
    assert list(a.state_dict()) == list(b.state_dict())
    for walk in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [n for n, _ in getattr(a, walk)()] == [n for n, _ in getattr(b, walk)()]
    assert list(a.state_dict(prefix="m.")) == list(b.state_dict(prefix="m."))


# ---- state ----


def test_state_dict_shares_its_tensors() -> None:
    model = Model()
    state = model.state_dict()
    assert list(state) == KEYS
    assert state["layers.1.q.weight"] is model.layers[1].q.weight
    into: dict[str, ic.Tensor] = {"before": ours(1)}
    assert model.state_dict(into, prefix="m.") is into
    assert list(into) == ["before", *(f"m.{key}" for key in KEYS)]


def test_loading_copies() -> None:
    """Into the module's own memory where shape, dtype and device are the same."""
    model = Model()
    addresses = {key: value.data_ptr() for key, value in model.state_dict().items()}
    values = {key: ours(*value.shape, seed=i) for i, (key, value) in enumerate(model.state_dict().items())}
    assert model.load_state_dict(values) == ([], [])
    for key, value in model.state_dict().items():
        assert value.data_ptr() == addresses[key]
        assert torch.equal(theirs(value), theirs(values[key]))


def test_loading_replaces_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 2)
    before = model.weight
    half = ic.from_torch(torch.ones(2, 3).half())
    model.load_state_dict({"weight": half})
    assert capsys.readouterr().out == (
        'infinicore.nn.Module.load_state_dict: "weight" was '
        "infinicore.Parameter(shape=[2, 3], dtype=infinicore.float32, device=cpu:0); replaced by "
        "infinicore.Tensor(shape=[2, 3], dtype=infinicore.float16, device=cpu:0)\n"
    )
    assert model.weight is not before and isinstance(model.weight, nn.Parameter)
    assert model.weight.dtype == ic.float16 and model.weight.data_ptr() == half.data_ptr()
    model.load_state_dict({"weight": ours(5, 3)})
    assert model.weight.shape == [5, 3]
    model.register_buffer("table", ours(2))
    model.load_state_dict({"table": ours(3)}, strict=False)
    assert model.table.shape == [3]


def test_missing_and_unexpected_names() -> None:
    model = Model()
    values = {key: ours(*value.shape, seed=5) for key, value in model.state_dict().items()}
    del values["norm.weight"]
    values["other"] = ours(1)
    with pytest.raises(RuntimeError, match="missing: norm.weight; unexpected: other"):
        model.load_state_dict(values)
    assert model.load_state_dict(values, strict=False) == (["norm.weight"], ["other"])
    with pytest.raises(RuntimeError, match="missing: norm.weight$"):
        model.load_state_dict({key: value for key, value in values.items() if key != "other"})
    with pytest.raises(RuntimeError, match="; unexpected: other$"):
        model.load_state_dict({**model.state_dict(), "other": ours(1)})
    assert torch.equal(theirs(model.gain), theirs(values["gain"]))
    with pytest.raises(TypeError, match='"gain" must be an infinicore.Tensor, got a torch.Tensor'):
        model.load_state_dict({"gain": torch.ones(3)}, strict=False)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="state_dict must be a mapping, got 3"):
        model.load_state_dict(3)  # type: ignore[arg-type]


def test_modes() -> None:
    model = Model()
    assert model.eval() is None
    assert not any(module.training for module in model.modules())
    assert model.train() is model
    assert all(module.training for module in model.modules())


def test_to() -> None:
    model = Model()
    model.embed.tied = model.embed.weight
    address = model.gain.data_ptr()
    assert model.to(CPU) is model
    assert model.gain.data_ptr() == address and isinstance(model.gain, nn.Parameter)
    assert model.embed.tied is model.embed.weight
    with pytest.raises(TypeError, match="device must be"):
        model.to(ic.float16)  # type: ignore[arg-type]


def test_repr() -> None:
    assert repr(nn.Linear(3, 4)) == "Linear(in_features=3, out_features=4, bias=False)"
    assert repr(nn.ModuleList([nn.RMSNorm(4)])) == "ModuleList(\n  (0): RMSNorm([4], eps=1e-06)\n)"


# ---- the list ----


def layers(count: int) -> list[nn.Linear]:
    return [nn.Linear(1, i + 1) for i in range(count)]


def test_module_list() -> None:
    a, b, c, d = layers(4)
    modules = nn.ModuleList([a, b])
    assert len(modules) == 2 and list(modules) == [a, b] and modules[-1] is b and b in modules and c not in modules
    assert modules.append(c) is modules and list(modules.state_dict()) == ["0.weight", "1.weight", "2.weight"]
    assert isinstance(modules[1:], nn.ModuleList) and list(modules[1:]) == [b, c]
    modules.extend([d])
    assert modules.pop(0) is a and list(modules) == [b, c, d] and list(modules._modules) == ["0", "1", "2"]
    modules.insert(1, a)
    assert list(modules) == [b, a, c, d]
    modules[-1] = b
    assert list(modules) == [b, a, c, b] and modules[3] is b
    del modules[1:3]
    assert list(modules) == [b, b]
    modules += [c]
    assert [*(modules + [d])] == [b, b, c, d] and len(modules) == 3
    assert len(nn.ModuleList()) == 0 and len(nn.ModuleList(x for x in (a, b))) == 2
    for wrong in (lambda: modules[3], lambda: modules[-4], lambda: modules.pop(7)):
        with pytest.raises(IndexError, match="index must be below 3"):
            wrong()
    with pytest.raises(TypeError, match="must be an infinicore Module or None, got 3"):
        modules.append(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be an infinicore Module or None, got 3"):
        modules[0] = 3  # type: ignore[assignment]


def test_a_list_keeps_its_place_in_the_walk() -> None:
    modules = nn.ModuleList(layers(3))

    def walk() -> Iterator[str]:
        return (name for name, _ in modules.named_parameters())

    assert list(walk()) == ["0.weight", "1.weight", "2.weight"]


# ---- layers ----


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias: bool) -> None:
    layer = nn.Linear(33, 20, bias=bias)
    assert layer.weight.shape == [20, 33] and (layer.bias is not None) == bias
    assert isinstance(layer.weight, nn.Parameter) and layer.weight.dtype == ic.float32 and layer.weight.device == CPU
    values = {name: ours(*tensor.shape) for name, tensor in layer.state_dict().items()}
    assert list(values) == ["weight", "bias"][: 1 + bias]
    layer.load_state_dict(values)
    x = ours(2, 5, 33)
    expected = torch.nn.functional.linear(*(theirs(t).double() for t in (x, *values.values())))
    torch.testing.assert_close(theirs(layer(x)).double(), expected, rtol=1e-5, atol=1e-5)


def test_rms_norm() -> None:
    layer = nn.RMSNorm(40, eps=1e-3, dtype=ic.bfloat16, device="cpu")
    assert layer.normalized_shape == [40] and layer.eps == 1e-3 and nn.RMSNorm([40]).eps == 1e-6
    weight, x = torch.randn(40).bfloat16(), torch.randn(3, 40).bfloat16() * 0.05
    layer.load_state_dict({"weight": ic.from_torch(weight)})
    expected = torch.nn.functional.rms_norm(x.double(), [40], weight.double(), 1e-3)
    torch.testing.assert_close(theirs(layer(ic.from_torch(x))).double(), expected, rtol=2**-8, atol=1e-6)
    with pytest.raises(AssertionError, match="elementwise_affine must be True"):
        nn.RMSNorm(40, elementwise_affine=False)


def test_embedding() -> None:
    layer = nn.Embedding(11, 8, padding_idx=3)
    table = ours(11, 8)
    layer.load_state_dict({"weight": table})
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([[3, 10], [0, 3]], dtype=dtype)
        assert torch.equal(theirs(layer(ic.from_torch(ids))), theirs(table)[ids.long()])
    with pytest.raises(AssertionError, match="padding_idx must be below 11, got 11"):
        nn.Embedding(11, 8, padding_idx=11)
    with pytest.raises(AssertionError, match="must have their defaults"):
        nn.Embedding(11, 8, max_norm=1.0)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_rope(name: str) -> None:
    """In place, with tables of float64 rounded once."""
    layer = nn.RoPE(50, 10000.0, 8, dtype=getattr(ic, name))
    assert list(layer.state_dict()) == []
    angles = torch.outer(torch.arange(50).double(), 10000.0 ** (-torch.arange(0, 8, 2).double() / 8))
    assert torch.equal(theirs(layer.sin_table), angles.sin().to(getattr(torch, name)))
    assert torch.equal(theirs(layer.cos_table), angles.cos().to(getattr(torch, name)))
    x, at = torch.randn(3, 2, 8).to(getattr(torch, name)), torch.tensor([49, 0, 7])
    expected = ic.nn.functional.rope(*map(ic.from_torch, (x.clone(), at)), layer.sin_table, layer.cos_table)
    states = ic.from_torch(x)
    assert layer(states, ic.from_torch(at)) is states
    assert torch.equal(x, theirs(expected))
    pairs = layer(ic.from_torch(x.clone()), ic.from_torch(at), ic.nn.functional.RopeAlgo.GPT_J)
    assert not torch.equal(theirs(pairs), theirs(layer(ic.from_torch(x.clone()), ic.from_torch(at))))
    with pytest.raises(ValueError, match="head_dim must be even, got 7"):
        nn.RoPE(50, 10000.0, 7)


def test_layers_in_a_graph() -> None:
    """Modules are recorded like ops; weights that are loaded later are those that a run uses."""
    layer, norm = nn.Linear(16, 16), nn.RMSNorm(16)
    x = ours(3, 16)
    with ic.graph() as g:
        y = norm(layer(x))
    for seed in (1, 2):
        layer.load_state_dict({"weight": ours(16, 16, seed=seed)})
        norm.load_state_dict({"weight": ours(16, seed=seed)})
        g.run()
        assert torch.equal(theirs(y), theirs(norm(layer(x))))
