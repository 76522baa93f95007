"""A user's own patch: a made-up norm and a made-up MLP, which no op of ours computes, replaced in models of any family.

No file of the package knows them: this file is all that a new kind of block costs.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_infini
from torch_infini.patch import Replacement, register, unregister

transformers = pytest.importorskip("transformers")

from torch_infini.testing.causal_types import build  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
CALLS: list[str] = []


class MeanNorm(nn.Module):
    """y = x / mean(|x|) * weight."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide / (wide.abs().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Product(nn.Module):
    """y = down(gate(x) * tanh(up(x)) + shift): the parts are linear layers, called as modules."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate, self.up, self.down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.register_buffer("shift", torch.full((1,), 0.125))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * torch.tanh(self.up(x)) + self.shift.to(x.dtype))


class OwnNorm(Replacement):
    op = "mean_norm"

    @staticmethod
    def takes(module: nn.Module) -> bool:
        return type(module).__name__ == "MeanNorm"

    @staticmethod
    def inputs(module: nn.Module) -> Iterator[tuple[Tensor]]:
        columns = len(module.weight)  # type: ignore[arg-type]
        yield (torch.randn(2, 3, columns),)
        yield (torch.randn(1, columns),)

    def compute(self, x: Tensor) -> Tensor:
        CALLS.append("norm")
        wide = x.float()
        return self.weight * (wide * (1 / (wide.abs().sum(-1, keepdim=True) / x.shape[-1] + self.eps))).to(x.dtype)


class OwnProduct(Replacement):
    op = "mul_tanh"

    @staticmethod
    def takes(module: nn.Module) -> bool:
        return type(module).__name__ == "Product"

    @staticmethod
    def inputs(module: nn.Module) -> Iterator[tuple[Tensor]]:
        yield (torch.randn(2, 3, module.get_submodule("gate").in_features),)  # type: ignore[arg-type]

    def compute(self, x: Tensor) -> Tensor:
        CALLS.append("product")
        return self.down(self.gate(x) * torch.tanh(self.up(x)) + self.shift.to(x.dtype))


@pytest.fixture
def registered() -> Iterator[None]:
    register(OwnNorm)
    register(OwnProduct)
    CALLS.clear()
    yield
    for one in (OwnNorm, OwnProduct):
        unregister(one)


def changed(kind: str) -> Any:
    """A small model with made-up norms and, in its second layer, a made-up MLP."""
    model = build(kind)
    for layer in model.model.layers:
        for name, child in list(layer.named_children()):
            if "norm" in name:
                setattr(layer, name, MeanNorm(child.weight.numel()))
    model.model.layers[1].mlp = Product(model.model.layers[1].mlp)
    return model.eval()


def ids() -> Tensor:
    return torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(3))


def close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("kind", ["llama", "gemma2", "olmo2"])
def test_replaced(kind: str, registered: None) -> None:
    model = changed(kind)
    original = copy.deepcopy(model)
    with torch.no_grad():
        expected = original(ids()).logits
    report = torch_infini.patch_model(model)
    assert CALLS
    ops = {row.name: row.op for row in report.replaced}
    norms = [name for name, module in model.named_modules() if isinstance(module, MeanNorm)]
    assert norms and all(ops[name] == "mean_norm" for name in norms)
    assert ops["model.layers.1.mlp"] == "mul_tanh" and ops["model.layers.1.mlp.down"] == "linear"
    assert not [row for row in report.left if "norm" in row.name]
    CALLS.clear()
    with torch.no_grad():
        close(model(ids()).logits, expected)
    assert CALLS.count("norm") == len(norms) and CALLS.count("product") == 1
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert torch.equal(other(ids()).logits, model(ids()).logits)
    seen = []
    with model.model.layers[1].mlp.up.register_forward_hook(lambda *args: seen.append(args)), torch.no_grad():
        model(ids())
    assert len(seen) == 1
    CALLS.clear()
    model(ids()).logits.sum().backward()  # the modules' own forward, which has gradients
    assert not CALLS and norms and model.get_submodule(norms[0]).weight.grad is not None
    torch_infini.unpatch_model(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]


def test_quantized_parts(registered: None) -> None:
    model = changed("llama")
    report = torch_infini.patch_model(model, weights="int8")
    parts = {row.name.rpartition(".")[2]: row.op for row in report.rows if row.name.startswith("model.layers.1.mlp.")}
    assert parts.keys() == {"gate", "up", "down"} and "linear" not in parts.values()
    with torch.no_grad():
        expected = changed("llama")(ids()).logits
        assert (model(ids()).logits - expected).norm() < 0.1 * expected.norm()


def test_compiled(registered: None) -> None:
    model = changed("llama")
    with torch.no_grad():
        expected = model(ids()).logits
        torch_infini.patch_model(model)
        torch.compiler.reset()
        close(torch.compile(model, backend="infini", fullgraph=True)(ids()).logits, expected)


def test_served(registered: None) -> None:
    """The engine runs it over its paged cache: the tokens of transformers' own loop."""
    model = changed("llama")
    prompts = [[3, 4, 5, 6, 7], [9, 8, 7]]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]
    torch_infini.patch_model(model)
    llm = torch_infini.LLM(model, max_model_len=64)
    outputs = llm.generate(prompts, torch_infini.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == expected


class Wrong(OwnNorm):
    def compute(self, x: Tensor) -> Tensor:
        return super().compute(x) * (1 if x.dtype == torch.float32 else 1.25)


class WithoutInputs(OwnNorm):
    @staticmethod
    def inputs(module: nn.Module) -> Iterator[tuple[Tensor]]:
        return iter(())


class InputsRaise(OwnNorm):
    @staticmethod
    def inputs(module: nn.Module) -> Iterator[tuple[Tensor]]:
        yield (torch.randn(2, 3, module.nothing),)  # type: ignore[call-overload]


class Raising(OwnNorm):
    def compute(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    "wrong, reason",
    [
        (Wrong, "Wrong: its own forward gives a different result in bfloat16"),
        (WithoutInputs, "WithoutInputs: WithoutInputs.inputs yields nothing to try it with"),
        (InputsRaise, "InputsRaise: InputsRaise.inputs raises AttributeError: .*nothing"),
        (Raising, "Raising: .*no such kernel"),
    ],
)
def test_left(wrong: type[Replacement], reason: str) -> None:
    """What computes something else is left, and the report says whose fault it is; the model computes as before."""
    model = changed("llama")
    with torch.no_grad():
        expected = model(ids()).logits
    register(wrong)
    try:
        report = torch_infini.patch_model(model)
    finally:
        unregister(wrong)
    rows = {row.name: row for row in report.left}
    row = rows["model.layers.0.input_layernorm"]
    assert row.module_class == "MeanNorm"
    assert re.search(reason, row.reason), row.reason
    with torch.no_grad():
        close(model(ids()).logits, expected)


def test_takes_that_raises() -> None:
    """A sentence, and the model is not patched."""

    class Careless(OwnNorm):
        @staticmethod
        def takes(module: nn.Module) -> bool:
            return bool(module.nothing)

    model = changed("llama")
    register(Careless)
    try:
        with pytest.raises(RuntimeError, match="Careless.takes must answer for any module, but raises AttributeError"):
            torch_infini.patch_model(model)
    finally:
        unregister(Careless)
    assert not torch_infini.is_patched(model)


def test_the_newest_first(registered: None) -> None:
    register(Wrong)
    try:
        report = torch_infini.patch_model(changed("llama"))
    finally:
        unregister(Wrong)
    ops = {row.name: row.op for row in report.replaced}
    assert ops["model.layers.0.input_layernorm"] == "mean_norm"  # the older one, because Wrong was left
    register(OwnNorm)  # again: a second time is once
    unregister(OwnNorm)
    assert "model.layers.0.input_layernorm" in {row.name for row in torch_infini.patch_model(changed("llama")).left}
    register(OwnNorm)


def test_bad_replacements() -> None:
    for wrong, got in ((3, "got 3"), (nn.Linear, "got <class"), (OwnNorm(), "got OwnNorm")):
        with pytest.raises(TypeError, match=f"register: replacement must be a subclass of .*Replacement, {got}"):
            register(wrong)  # type: ignore[type-var]
    for without in ("op", "takes", "inputs", "compute"):
        whole = {name: vars(OwnNorm)[name] for name in ("op", "takes", "inputs", "compute") if name != without}
        with pytest.raises(TypeError, match=f"defines op, takes, inputs and compute, got Part without {without}"):
            register(type("Part", (Replacement,), whole))
    with pytest.raises(ValueError, match="unregister: replacement must be a registered Replacement, got <class"):
        unregister(OwnNorm)
