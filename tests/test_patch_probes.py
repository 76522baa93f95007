"""Modules whose formula differs only for some numbers, lengths, dtypes or layers: patch_model leaves each of them.

Each case is a formula that a small call of a few tokens does not show, and what the report says about it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.tiny_llama import close, logits, tiny, tokens
from torch_infini.patch import patch_model, patched
from torch_infini.patch.checks.fingerprint import Fingerprints
from torch_infini.patch.own_forward import cache_name

transformers = pytest.importorskip("transformers")
llama = transformers.models.llama.modeling_llama
pytestmark = pytest.mark.usefixtures("one_thread")

Model = Any
CACHE = cache_name(llama.LlamaAttention.forward)
OTHER = "its own forward gives a different result"


def clamp(x: Tensor) -> Tensor:
    return x.clamp(-8, 8)


class ClampedInput(llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(clamp(x))


class ClampedGate(llama.LlamaMLP):
    """The clamp of GPT-OSS: of gate from above only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x))


class ClampedProduct(llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).clamp(max=65504))


class LongMLP(llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if x.shape[1] > 4 else 1)


class DecodeMLP(llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if x.shape[1] == 1 else 1)


class HalfMLP(llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if x.dtype == torch.float16 else 1)


class WithoutNaN(llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).nan_to_num()


class SmallLeftOut(llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.where(x.abs() > 1e-4, x, 0))


class ClampedNorm(llama.LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(clamp(x))


class LongNorm(llama.LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if x.dim() == 3 and x.shape[1] > 4 else 1)


class ClampedQueries(llama.LlamaAttention):
    """OLMo's clip_qkv, of the queries alone."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        projection = self.q_proj
        self._modules["q_proj"] = nn.Sequential(projection, nn.Hardtanh(-8, 8))
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            self._modules["q_proj"] = projection


class ClampedValues(llama.LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        projection = self.v_proj
        self._modules["v_proj"] = nn.Sequential(projection, nn.Hardtanh(-8, 8))
        try:
            return super().forward(hidden_states, *args, **kwargs)
        finally:
            self._modules["v_proj"] = projection


class ClampedScores(llama.LlamaAttention):
    """In plain torch, its scores at most 20."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(hidden_states).view(shape).transpose(1, 2) for layer in layers)
        q, k = llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        k, v = (llama.repeat_kv(x, self.num_key_value_groups) for x in (k, v))
        scores = (q @ k.transpose(2, 3) * self.scaling).clamp(max=20) + (
            0 if attention_mask is None else attention_mask
        )
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), None


class LongAttention(llama.LlamaAttention):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        y, weights = super().forward(hidden_states, *args, **kwargs)
        return y * (0.5 if hidden_states.shape[1] > 4 else 1), weights


class CachedAttention(llama.LlamaAttention):
    """Another formula where there is a cache."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        y, weights = super().forward(hidden_states, *args, **kwargs)
        return y * (1 if kwargs.get(CACHE) is None else 0.5), weights


class ClampedLayer(llama.LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, *args, **kwargs).clamp(-1000, 1000)


class ClampedBranch(llama.LlamaDecoderLayer):
    """Clamps what attention gives, before it is added."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        y, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + y.clamp(-1000, 1000)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class FiniteLayer(llama.LlamaDecoderLayer):
    """Keeps float16 from infinity, as T5 does."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = super().forward(hidden_states, *args, **kwargs)
        return y.clamp(-65504, 65504) if y.dtype == torch.float16 else y


class LongLayer(llama.LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, *args, **kwargs) * (0.5 if hidden_states.shape[1] > 4 else 1)


CASES: dict[type[nn.Module], str] = {
    ClampedInput: "for numbers of about 30",
    ClampedGate: "for numbers of about 30",
    ClampedProduct: "for numbers of about 10000",
    LongMLP: "for 40 tokens",
    DecodeMLP: "for 1 token",
    HalfMLP: "in float16",
    WithoutNaN: "for hidden states with NaN",
    SmallLeftOut: "for hidden states of about 0.01",
    ClampedNorm: "for numbers of about 30",
    LongNorm: "for 40 tokens",
    ClampedQueries: "for queries and values of about 30",
    ClampedValues: "for queries and values of about 30",
    ClampedScores: "for scores of about 30",
    LongAttention: "for 40 tokens",
    CachedAttention: "with a cache",
    ClampedLayer: "for numbers of about 10000",
    ClampedBranch: "for numbers of about 10000",
    FiniteLayer: "for numbers beyond the range of float16",
    LongLayer: "for 40 tokens",
}


def place(cls: type[nn.Module]) -> str:
    """Where in layer 1 a class of CASES belongs."""
    places = {llama.LlamaMLP: ".mlp", llama.LlamaRMSNorm: ".input_layernorm", llama.LlamaAttention: ".self_attn"}
    return "model.layers.1" + places.get(cls.__mro__[1], "")


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_left(cls: type[nn.Module]) -> None:
    model = tiny()
    model.get_submodule(place(cls)).__class__ = cls
    with patched(model) as report:
        reasons = {row.name: row.reason for row in report.left}
    assert reasons[place(cls)] == f"{OTHER} {CASES[cls]}", reasons
    assert reasons.keys() <= {place(cls), "model.layers.1"}


def test_clipped_olmo() -> None:
    """clip_qkv is in the config, which the report cannot tell; the clamp works only on large weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    ids = tokens()
    for clip in (8.0, None):
        config = transformers.OlmoConfig(**sizes, num_attention_heads=4, clip_qkv=clip, pad_token_id=0)
        model = transformers.OlmoForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "self_attn" in name:
                    parameter.mul_(30)
        expected = logits(model, ids)
        report = patch_model(model)
        attention = {row.name: row.op for row in report.rows if row.name.endswith("self_attn")}
        # Clipped, it keeps its own forward, which calls our function.
        op = "attention" if clip else "fused_linear, rope, attention, linear"
        assert attention == {f"model.layers.{i}.self_attn": op for i in range(2)} and not report.left
        close(logits(model, ids), expected)


# One module's answer for another


class Scaled(llama.LlamaMLP):
    """Multiplies by what some attribute holds."""

    holder: Any

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.value()

    def value(self) -> Any:
        holder = self.holder
        if isinstance(holder, list | tuple):
            return holder[0]
        if isinstance(holder, dict):
            return holder["by"]["how much"]
        if isinstance(holder, set):
            return next(iter(holder))
        return holder() if callable(holder) else holder


class Holder:
    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self) -> float:
        return self.value


class Number(nn.Module):
    """Stands in an attribute, and is no submodule."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> float:
        return self.value


HOLDERS: dict[str, Callable[[float], Any]] = {
    "list": lambda x: [x],
    "tuple": lambda x: (x, 2),
    "dict": lambda x: {"by": {"how much": x}},
    "set": lambda x: {x},
    "tensor": lambda x: torch.tensor(x),
    "function": lambda x: lambda: x,
    "object": Holder,
    "module": lambda x: Number(x),
}


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("other", [0, 1])
def test_attributes(kind: str, other: int) -> None:
    """Two layers that differ in one attribute: the answer for one is not taken for the other."""
    model = tiny()
    for i, layer in enumerate(model.model.layers):
        layer.mlp.__class__ = Scaled
        vars(layer.mlp)["holder"] = HOLDERS[kind](1.1 if i == other else 1.0)
    report = patch_model(model)
    assert {row.name: row.reason for row in report.left} == {f"model.layers.{other}.mlp": OTHER}


class ByLayer(llama.LlamaAttention):
    """Another formula in layers behind the first."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, weights = super().forward(*args, **kwargs)
        return y * (1 + 0.1 * self.layer_idx), weights


class ByLayerAndCache(llama.LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, weights = super().forward(*args, **kwargs)
        return y * (1 if kwargs.get(CACHE) is None or self.layer_idx == 0 else 0.5), weights


class ByConfig(llama.LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, weights = super().forward(*args, **kwargs)
        return y * (self.config.factors[0] if hasattr(self.config, "factors") else 1), weights


@pytest.mark.parametrize("cls", [ByLayer, ByLayerAndCache, ByConfig], ids=lambda cls: cls.__name__)
def test_layers(cls: type[nn.Module]) -> None:
    model = tiny(num_hidden_layers=4)
    for layer in model.model.layers:
        layer.self_attn.__class__ = cls
    if cls is ByConfig:
        for layer in model.model.layers[1:]:
            layer.self_attn.config = copy.copy(model.config)
            layer.self_attn.config.factors = [0.5]
    when = " with a cache" if cls is ByLayerAndCache else ""
    report = patch_model(model)
    assert {row.name: row.reason for row in report.left} == {
        f"model.layers.{i}.self_attn": f"{OTHER}{when}" for i in (1, 2, 3)
    }


def test_fingerprints() -> None:
    """Equal for what is alike by value, never for what cannot be compared; what holds itself is no endless loop."""
    of = Fingerprints().of_value
    alike: list[tuple[Any, Any]] = [([1, 2.0], [1, 2.0]), ({"a": {1}}, {"a": {1}}), (torch.ones(2), torch.ones(2))]
    alike += [(nn.SiLU(), nn.SiLU()), (nn.Hardtanh(0, 2), nn.Hardtanh(0, 2)), (nn.Linear(0, 0), nn.Linear(0, 0))]
    for a, b in alike:
        assert of(a) == of(b), a
    unlike: list[tuple[Any, Any]] = [(1, 1.0), (1, True), ([1], (1,)), (0.0, -0.0), ({"a": 1}, {"a": 2})]
    unlike += [(torch.ones(2), torch.ones(2).half()), (torch.ones(2), torch.tensor([1, 2.0])), (lambda: 1, lambda: 1)]
    unlike += [(nn.Hardtanh(0, 2), nn.Hardtanh(0, 3)), (nn.ReLU(), nn.SiLU()), (Holder(1), Holder(1))]
    unlike += [(torch.ones(99, 99), torch.ones(99, 99)), (nn.PReLU(init=0.1), nn.PReLU(init=0.2))]
    for a, b in unlike:
        assert of(a) != of(b), (a, b)
    itself: dict[str, Any] = {}
    itself["itself"] = itself
    assert of(itself) == of(itself) != of({})


def test_attributes_stay() -> None:
    """Trial calls write to copies: neither lists nor tensors of the modules change."""

    class Counting(llama.LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            self.calls.append(x.shape)
            self.count.add_(1)
            return super().forward(x)

    model = tiny()
    for layer in model.model.layers:
        layer.mlp.__class__ = Counting
        layer.mlp.calls, layer.mlp.count = [], torch.zeros(1)
    random = torch.get_rng_state()
    patch_model(model, strict=True)
    assert torch.equal(torch.get_rng_state(), random)
    for layer in model.model.layers:
        assert layer.mlp.calls == [] and layer.mlp.count == 0


def test_number_of_threads_stays() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        patch_model(tiny())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("where", ["float64", "bfloat16", "meta", "inference"])
def test_defaults_of_torch(where: str) -> None:
    """Neither the default dtype nor the default device nor inference mode plays a part in trials."""
    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    default = torch.get_default_dtype()
    try:
        if where in ("float64", "bfloat16"):
            torch.set_default_dtype(getattr(torch, where))
        with torch.device("meta") if where == "meta" else torch.inference_mode(where == "inference"):
            report = patch_model(model, strict=True)
    finally:
        torch.set_default_dtype(default)
    assert not report.untried and not report.left
    close(logits(model, ids), expected)
