"""What patch_model leaves as it was and what it says of it; what it and unpatch_model refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_infini
from support.fresh_python import run_python
from support.tiny_llama import LAYERS, calls, close, config_values, identity, in_order, logits, tiny, tokens
from torch_infini._core import products
from torch_infini.patch import PatchReport, is_patched, patch_model, unpatch_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


class ScaledMLP(transformers.models.llama.modeling_llama.LlamaMLP):
    """Has the names and shapes of LlamaMLP, and in some layers another formula."""

    scale = 1.1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class OtherRounding(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    """Multiplies by the weight before it rounds, as some families do."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(
            x.dtype
        )


class UnitOffset(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    """Gemma's: the scale is 1 + weight, rounded at the end."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Centred(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    """No RMSNorm: it takes the mean away."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


# Norms, and the number of their rounding in torch.ops.infini.rms_norm; None: none of them.
ROUNDINGS: dict[type[nn.Module], int | None] = {
    transformers.models.llama.modeling_llama.LlamaRMSNorm: 1,
    OtherRounding: 0,
    UnitOffset: 2,
    Centred: None,
}


class ScaledByPosition(transformers.models.llama.modeling_llama.LlamaAttention):
    """Follows the positions, where they are far, in another way than through cos and sin."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, weights = super().forward(hidden_states, *args, **kwargs)
        return output * (1 + 0.1 * (kwargs["position_ids"].max() > 8192)), weights


def scale_by_position(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.__class__ = ScaledByPosition


def scale_mlp(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.__class__ = ScaledMLP
    model.model.layers[0].mlp.scale = 1.0


def bind_forward(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.forward = attention.forward


class RaisingMLP(transformers.models.llama.modeling_llama.LlamaMLP):
    """Fails on the small input by which it is checked, as a module does that needs more than it is given there."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 3:
            raise ValueError("no such thing as three tokens")
        return super().forward(x)


def raising_mlp(model: Any) -> None:
    model.model.layers[1].mlp.__class__ = RaisingMLP


def another_layer(model: Any) -> None:
    model.model.layers[0].extra = nn.Linear(2, 2)


def another_norm(model: Any) -> None:
    model.model.layers[0].post_attention_layernorm = nn.LayerNorm(64)


def mixed_mlp(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.bfloat16()


def replace_forward(model: Any) -> None:
    norm = model.model.layers[0].post_attention_layernorm
    norm.forward = lambda x: 2 * x


def double_head(model: Any) -> None:
    model.lm_head.double()


def meta_mlp(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.to("meta")


def own_parameter(model: Any) -> None:
    class Buffer(nn.Parameter):
        pass

    model.model.layers[0].mlp.up_proj.weight = Buffer(model.model.layers[0].mlp.up_proj.weight.detach())


def asks_for_attentions(model: Any) -> None:
    model.config.output_attentions = True


LEFT: dict[Callable[[Any], None], dict[str, str]] = {
    scale_mlp: {"model.layers.1.mlp": "its own forward gives a different result"},
    scale_by_position: {
        f"model.layers.{i}.self_attn": "its own forward gives a different result" for i in range(LAYERS)
    },
    bind_forward: {"model.layers.0.self_attn": "its forward was replaced on the instance"},
    raising_mlp: {"model.layers.1.mlp": "it cannot be checked against its own forward: no such thing as three tokens"},
    another_layer: {"model.layers.0": "its submodules are not self_attn, mlp and norms: extra, mlp, self_attn"},
    another_norm: {
        "model.layers.0": "its norms (input_layernorm) are in no known layout",
    },
    replace_forward: {
        "model.layers.0": "its post_attention_layernorm was left unpatched",
        "model.layers.0.post_attention_layernorm": "its forward was replaced on the instance",
    },
    double_head: {"lm_head": "weight is float64, not float32, bfloat16 or float16"},
    meta_mlp: {
        "model.layers.1.mlp": "up_proj.weight is on meta: load the model without device_map or offloading to have it "
        "patched"
    },
    mixed_mlp: {"model.layers.0.mlp": "its parameters have several dtypes"},
    own_parameter: {"model.layers.0.mlp": "up_proj.weight is a Buffer, not a plain parameter"},
    asks_for_attentions: {
        f"model.layers.{i}.self_attn": "config.output_attentions is set, but the kernel stores no attention weights"
        for i in range(LAYERS)
    },
}


@pytest.mark.parametrize("change", LEFT, ids=lambda change: change.__name__)
def test_left(change: Callable[[Any], None]) -> None:
    model, ids = tiny(attn_implementation="eager"), tokens()
    change(model)
    runs = change not in (double_head, meta_mlp, mixed_mlp)
    expected = logits(model, ids) if runs else None
    before, values = identity(model), config_values(model)
    listed = "; ".join(f"{name} ({reason})" for name, reason in LEFT[change].items())
    with pytest.raises(ValueError) as caught:
        patch_model(model, strict=True)
    assert str(caught.value) == f"torch_infini.patch_model: strict=True, but these would be left: {listed}"
    assert identity(model) == before and config_values(model) == values
    report = patch_model(model)
    assert {row.name: row.reason for row in report.left} == LEFT[change]
    assert len(report.replaced) == len(report.rows) - len(report.left)
    attention_left = any("self_attn" in name for name in LEFT[change])
    assert model.config._attn_implementation == ("eager" if attention_left else "infini")
    if runs:
        close(logits(model, ids), expected)
    unpatch_model(model)
    assert identity(model) == before and config_values(model) == values


@pytest.mark.parametrize("cls", ROUNDINGS, ids=lambda cls: cls.__name__)
def test_roundings(cls: type[nn.Module]) -> None:
    """Where a norm rounds is found out even in float32 with weights of ones, where it makes no difference."""
    model = tiny()
    norm = model.model.norm
    norm.__class__ = cls
    norm.weight.data.fill_(1)
    report = patch_model(model)
    assert [(row.name, row.reason) for row in report.left] == (
        [("model.norm", "its own forward gives a different result")] if ROUNDINGS[cls] is None else []
    )
    if ROUNDINGS[cls] is None:
        return
    norm.weight.data.uniform_(0.5, 1.5)
    model.bfloat16()
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        expected = cls.forward(norm, x)
        others = [torch.ops.infini.rms_norm(x, norm.weight, norm.variance_epsilon, i) for i in range(3)]
        assert (norm(x) != expected).sum() <= 4  # of 4096: where the order of the sum decides
    assert norm._infini_plan.rounding == ROUNDINGS[cls]
    assert all((other != expected).sum() > 100 for i, other in enumerate(others) if i != ROUNDINGS[cls])


def test_other_activation() -> None:
    model, ids = tiny(hidden_act="gelu"), tokens()
    expected = logits(model, ids)
    report = patch_model(model)
    reason = "its activation is GELUActivation, neither SiLU nor GELU by tanh"
    assert [row.reason for row in report.left] == [reason] * LAYERS
    close(logits(model, ids), expected)


def test_report() -> None:
    model = tiny()
    scale_mlp(model)
    report = patch_model(model)
    assert isinstance(report, PatchReport)
    assert str(report) == (
        "LlamaForCausalLM (llama) patched: 15 modules replaced, 1 left (1 replaced in parts)\n"
        "  2 x  model.layers.*                           LlamaDecoderLayer     add_rms_norm\n"
        "  2 x  model.layers.*.self_attn                 LlamaAttention        fused_linear, rope, attention, linear"
        "  24.6 k parameters  98.3 kB\n"
        "  1 x  model.layers.*.mlp                       ScaledMLP             fused_linear, swiglu, linear         "
        "  30.7 k parameters  123 kB\n"
        "  2 x  model.layers.*.input_layernorm           LlamaRMSNorm          rms_norm                             "
        "  128 parameters     512 B\n"
        "  2 x  model.layers.*.post_attention_layernorm  LlamaRMSNorm          rms_norm                             "
        "  128 parameters     512 B\n"
        "  1 x  model.layers.*.mlp                       ScaledMLP             in parts: its own forward gives a "
        "different result\n"
        "  1 x  model.layers.*.mlp.gate_proj             Linear                linear                               "
        "  10.2 k parameters  41 kB\n"
        "  1 x  model.layers.*.mlp.up_proj               Linear                linear                               "
        "  10.2 k parameters  41 kB\n"
        "  1 x  model.layers.*.mlp.down_proj             Linear                linear                               "
        "  10.2 k parameters  41 kB\n"
        "  1 x  model.norm                               LlamaRMSNorm          rms_norm                             "
        "  64 parameters      256 B\n"
        "  1 x  model.rotary_emb                         LlamaRotaryEmbedding  rope (sliced once for all layers)\n"
        "  1 x  lm_head                                  Linear                linear                               "
        "  8.19 k parameters  32.8 kB\n"
        f"  dense products of float32: {products.described(torch.float32, ('linear', 'matmul'))}"
    )
    assert sum(row.parameters for row in report.rows) == model.num_parameters() - 64 * 128
    assert report.counts["rms_norm"] == 2 * LAYERS + 1 and report.counts["in parts"] == 1


def test_unknown_family() -> None:
    wanted = (
        "it is no model of transformers with an embedding of tokens and layers; "
        'torch.compile(model, backend="infini") takes any model, and computes the norms and attention that it finds'
    )
    for model, name in (
        (nn.Sequential(nn.Embedding(8, 2), nn.Linear(2, 8)), "Sequential"),
        (nn.Linear(2, 2), "Linear"),
    ):
        before = identity(model)
        report = patch_model(model)
        assert str(report) == f"{name} not patched: {wanted}" and not report.rows
        assert identity(model) == before and not is_patched(model)
        assert patch_model(model, verify=True).reason == wanted
        with pytest.raises(ValueError) as caught:
            patch_model(model, strict=True)
        assert str(caught.value) == f"torch_infini.patch_model: strict=True, but {name} cannot be: {wanted}"
    with pytest.raises(TypeError) as caught:
        patch_model(None)
    assert str(caught.value) == "torch_infini.patch_model: model must be a torch.nn.Module, got NoneType"


def test_unpatch_of_an_unpatched_model() -> None:
    for model in (tiny(), nn.Linear(2, 2), None):
        with pytest.raises(ValueError) as caught:
            unpatch_model(model)
        name = type(model).__name__
        assert str(caught.value) == f"torch_infini.unpatch_model: model must be patched, got a {name} that is not."


def test_model_around_a_patched_decoder() -> None:
    """Its head is not patched: that is refused, and unpatch_model makes it possible."""
    model = tiny()
    patch_model(model.model)
    before = identity(model)
    with pytest.raises(ValueError) as caught:
        patch_model(model)
    assert str(caught.value) == (
        "torch_infini.patch_model: model must not contain patched modules, got model: "
        "first call unpatch_model with this model."
    )
    assert identity(model) == before and is_patched(model)
    unpatch_model(model)
    assert in_order(model) and not is_patched(model) and not is_patched(model.model)
    assert not patch_model(model, strict=True).already_patched


def test_decoder_of_a_patched_model() -> None:
    """It is patched; taken back alone, the head stays patched, and the model says so."""
    model, ids = tiny(), tokens()
    expected, config = logits(model, ids), model.config
    patch_model(model)
    before = identity(model)
    assert is_patched(model.model) and patch_model(model.model).already_patched and identity(model) == before
    unpatch_model(model.model)
    assert in_order(model.model) and not is_patched(model.model) and model.model.config is config
    assert is_patched(model) and calls(model, ids) == {"linear": 1}
    close(logits(model, ids), expected)
    with pytest.raises(ValueError, match="got lm_head: first call unpatch_model with this model"):
        patch_model(model)
    unpatch_model(model)
    assert in_order(model) and not is_patched(model) and model.config is config
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize(("function", "call"), [("swap", 0), ("swap", 7), ("replace_config", 0)])
def test_failure_changes_nothing(monkeypatch: pytest.MonkeyPatch, function: str, call: int) -> None:
    import torch_infini.patch.apply as module

    real, count = getattr(module, function), iter(range(100))

    def failing(*args: Any) -> None:
        if next(count) == call:
            raise RuntimeError("planted")
        real(*args)

    monkeypatch.setattr(module, function, failing)
    model = tiny().train()
    before, values = identity(model), config_values(model)
    with pytest.raises(RuntimeError, match="planted"):
        patch_model(model)
    assert identity(model) == before and config_values(model) == values and not is_patched(model)


def test_import_is_cheap() -> None:
    """`import torch_infini` leaves transformers alone, and without it patch_model says what is missing."""
    code = (
        "import sys, torch, torch_infini\n"
        "assert 'transformers' not in sys.modules\n"
        "sys.modules['transformers'] = None\n"
        "try: torch_infini.patch_model(torch.nn.Identity())\n"
        "except ImportError as error: print(error)\n"
    )
    run = run_python(code, check=True)
    assert run.stdout == "torch_infini.patch_model needs transformers: run `pip install 'transformers>=5,<5.25'`.\n"


def test_exports() -> None:
    assert torch_infini.patch_model is patch_model and torch_infini.unpatch_model is unpatch_model
    assert torch_infini.PatchReport is PatchReport


@pytest.mark.parametrize(("name", "value"), [("only", "lm_head"), ("skip", 5), ("skip", [1])])
def test_patterns(name: str, value: Any) -> None:
    with pytest.raises(TypeError) as caught:
        patch_model(tiny(), **{name: value})
    assert str(caught.value) == f"torch_infini.patch_model: {name} must be a sequence of patterns, got {value!r}"


def test_offloaded_by_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny()
    accelerate.cpu_offload(model)
    reasons = {row.name: row.reason for row in patch_model(model).left}
    mend = "load the model without device_map or offloading to have it patched"
    assert reasons["model.norm"] == f"accelerate replaced its forward, to move its weights: {mend}"
    assert reasons["model.layers.0.mlp"] == f"gate_proj.weight is on meta: {mend}"


def test_weights_of_torchao() -> None:
    """By the name of their class's package: torchao itself is not needed."""
    own = type("AffineQuantizedTensor", (Tensor,), {"__module__": "torchao.dtypes"})
    model = tiny()
    layer = model.model.layers[0].mlp.up_proj
    layer._parameters["weight"] = layer.weight.detach().as_subclass(own)
    (row,) = (row for row in patch_model(model).left if row.name == "model.layers.0.mlp")
    assert row.reason == (
        "up_proj.weight is a AffineQuantizedTensor of torchao: patch the model as it was before, with weights='int8' "
        "or 'int4'"
    )
