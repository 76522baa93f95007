"""patch_model on models with Mamba and Mamba-2 mixers: logits, padded batches, caches, generation, compilation, export,
hooks, quantized weights, unpatching.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_infini
from torch_infini.testing.causal_types import build

pytestmark = pytest.mark.usefixtures("one_thread")
MAMBA, MAMBA2 = "causal_conv1d, selective_scan", "causal_conv1d, ssd"
OPS = {
    "bamba": MAMBA2,
    "jamba": MAMBA,
    "falcon_h1": MAMBA2,
    "granitemoehybrid": MAMBA2,
    "mamba2": MAMBA2,
    "nemotron_h": MAMBA2,
    "zamba2": MAMBA2,
    "falcon_mamba": MAMBA,
    "mamba": MAMBA,
    "zamba": MAMBA,
}
MAMBAS = ("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM")
QUICK = ("bamba", "jamba")
EVERY = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.full) for kind in OPS]


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Token ids [2, 90] and their mask: the first 7 of row 0 are padding."""
    ids = torch.randint(2, 128, (2, 90), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return {"input_ids": ids, "attention_mask": mask}


def patched(model: Any, kind: str, **settings: Any) -> Any:
    """Patch the model, and check that all its mixers are replaced, and nothing is left (but Zamba's MLPs in parts)."""
    report = torch_infini.patch_model(model, strict=not kind.startswith("zamba"), **settings)
    mixers = [name for name, module in model.named_modules() if hasattr(module, "conv1d")]
    assert mixers and {row.op for row in report.rows if row.name in mixers} == {OPS[kind]}, report
    return model


def mixer(model: Any) -> Any:
    return next(
        module for module in model.modules() if any(isinstance(child, nn.Conv1d) for child in module.children())
    )


def in_parts(model: Any, ids: Tensor) -> Tensor:
    """Return logits of the parts of a text, one after the other through the cache."""
    cache, logits = None, []
    name = "cache_params" if type(model).__name__ in MAMBAS else "past_key_values"
    for part in ids.split([70, 1, 1, 18], 1):
        out = model(part, **{name: cache}, use_cache=True)
        cache = getattr(out, name)
        logits.append(out.logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("kind", EVERY)
@torch.no_grad()
def test_same_results(kind: str, batch: dict[str, Tensor]) -> None:
    """Logits of a padded prompt, of its parts through the cache, and the tokens that generate chooses."""
    model = build(kind).eval()
    kept = batch["attention_mask"].bool()
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ids = batch["input_ids"][1:]
    expected, tokens, parts = model(**batch).logits, model.generate(**batch, **settings), in_parts(model, ids)
    patched(model, kind)
    close = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(model(**batch).logits[kept], expected[kept], **close)
    assert torch.equal(model.generate(**batch, **settings), tokens)
    torch.testing.assert_close(in_parts(model, ids), parts, **close)
    torch.testing.assert_close(deepcopy(model)(**batch).logits[kept], expected[kept], **close)
    torch_infini.unpatch_model(model)
    assert torch.equal(model(**batch).logits, expected)


@pytest.mark.parametrize("kind", EVERY)
@torch.no_grad()
def test_caches(kind: str, batch: dict[str, Tensor]) -> None:
    """A static cache, and beams, which reorder the states."""
    model, other = build(kind).eval(), patched(build(kind).eval(), kind)
    for settings in ({"cache_implementation": "static"}, {"num_beams": 3}):
        ways = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **settings}
        assert torch.equal(other.generate(**batch, **ways), model.generate(**batch, **ways))


@pytest.mark.parametrize("kind", EVERY)
@torch.no_grad()
def test_large_weights(kind: str) -> None:
    """Weights twice as large, where states and gates are far from zero."""
    model = build(kind).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(2)
    ids = torch.randint(2, 128, (2, 57), generator=torch.Generator().manual_seed(2))
    expected = model(ids).logits
    found = patched(model, kind)(ids).logits
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("kind", EVERY)
@torch.no_grad()
def test_half(kind: str, batch: dict[str, Tensor]) -> None:
    """In bfloat16 the patched model is about as near to float32 as the original, and its states are float32."""
    model = build(kind).eval()
    exact = model(**batch).logits
    model.bfloat16()
    own = (model(**batch).logits - exact).norm()
    assert (patched(model, kind)(**batch).logits - exact).norm() < 1.2 * own
    out = model(batch["input_ids"], use_cache=True)
    states = out.get("past_key_values", out.get("cache_params"))
    assert states.get_recurrent_state(getattr(mixer(model), "layer_idx")).dtype == torch.float32  # noqa: B009


@torch.no_grad()
def test_limits_of_the_time_step() -> None:
    """A prompt's time steps are limited, and one token's are not, as by transformers' functions."""
    model = build("bamba").eval()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.4, 0.6)
    ids = torch.randint(2, 128, (1, 90), generator=torch.Generator().manual_seed(3))
    free, expected = build("bamba").eval()(ids).logits, in_parts(model, ids)
    found = in_parts(patched(model, "bamba"), ids)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert (found[:, :70] - free[:, :70]).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["bamba", "jamba"])
def test_hooks_and_gradients(kind: str, batch: dict[str, Tensor]) -> None:
    """Hooks inside a mixer see what they see without the patch; a backward runs through the mixer's own forward."""
    model = build(kind).eval()
    seen: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.extend((args[0].detach().clone(), output.detach().clone()))

    def results() -> list[Tensor]:
        inside = mixer(model)
        handles = [inside._modules[name].register_forward_hook(note) for name in ("in_proj", "out_proj")]
        handles.append(inside.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone())))
        with torch.no_grad():
            model(**batch)
        for handle in handles:
            handle.remove()
        kept, seen[:] = list(seen), []
        return kept

    expected = results()
    patched(model, kind)
    found = results()
    assert len(found) == len(expected) == 5
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    model(**batch).logits.square().mean().backward()
    assert mixer(model).A_log.grad.isfinite().all()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["bamba", "jamba"])
@pytest.mark.parametrize("backend", ["aot_eager", "infini"])
@torch.no_grad()
def test_compiled(backend: str, kind: str, batch: dict[str, Tensor]) -> None:
    model = patched(build(kind).eval(), kind)
    ids = batch["input_ids"]
    expected, parts = model(ids).logits, in_parts(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(ids).logits, expected, rtol=1e-3, atol=1e-3)
    if backend == "aot_eager":  # each part is compiled for itself
        torch.testing.assert_close(in_parts(compiled, ids), parts, rtol=1e-3, atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["bamba", "jamba"])
@torch.no_grad()
def test_exported(kind: str, batch: dict[str, Tensor]) -> None:
    model = patched(build(kind).eval(), kind)
    expected = model(batch["input_ids"], use_cache=False).logits
    program = torch.export.export(model, (batch["input_ids"],), {"use_cache": False}, strict=False)
    found = program.module()(batch["input_ids"], use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_quantized(batch: dict[str, Tensor]) -> None:
    """The layer whose weight the mixer reads, and does not call, keeps its weight."""
    model = build("jamba").eval()
    expected = model(**batch).logits
    patched(model, "jamba", weights="int8")
    inside = mixer(model)
    assert type(inside.dt_proj) is nn.Linear and type(inside.in_proj) is not nn.Linear
    assert (model(**batch).logits - expected).norm() < 0.2 * expected.norm()


def test_other_activation() -> None:
    """A convolution with another activation than silu is left, with the reason."""
    model = build("bamba").eval()
    for module in model.modules():
        if hasattr(module, "conv1d"):
            module.activation = "gelu"
    rows = [row for row in torch_infini.patch_model(model).rows if row.name.endswith("mamba")]
    assert rows and all(row.reason == "the activation of its convolution is gelu, not silu" for row in rows)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("groups", [1, 4])
@torch.no_grad()
def test_gated_norm_of_falcon_h1(first: bool, groups: int) -> None:
    """With a gate before or after the norm, which has groups of columns."""
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

    model = build("falcon_h1").eval()
    inside = mixer(model)
    inside.norm = FalconH1RMSNormGated(inside.intermediate_size, 1e-5, groups, norm_before_gate=not first)
    inside.norm.weight.copy_(torch.randn(inside.intermediate_size))
    inside.mamba_rms_norm = True
    ids = torch.randint(2, 128, (2, 57), generator=torch.Generator().manual_seed(4))
    expected = model(ids).logits
    report = torch_infini.patch_model(model)
    assert [row.op for row in report.rows if row.name.endswith("mamba.norm") and row.op != "left"] == [
        "rms_norm, swiglu"
    ]
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-3)
