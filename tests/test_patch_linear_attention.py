"""patch_model on models with linear attention or short convolutions: logits, padded batches, generation, compilation,
hooks, unpatching.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_infini
from torch_infini.testing.causal_types import build

FAMILIES = ["qwen3_5_text", "olmo_hybrid", "lfm3", pytest.param("qwen3_next", marks=pytest.mark.full)]
OPS = {"linear_attn": "causal_conv1d, gated_delta_rule", "conv": "causal_conv1d"}


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Token ids [2, 90] and their mask: the first 7 of row 0 are padding."""
    ids = torch.randint(2, 128, (2, 90), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return {"input_ids": ids, "attention_mask": mask}


def linear_attention(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("linear_attn"))


def patched(model: Any) -> Any:
    """Patch the model, and check that all its linear attention and short convolutions are replaced."""
    report = torch_infini.patch_model(model, strict=True)
    found = [(OPS[kind], row.op) for row in report.rows if (kind := row.name.rpartition(".")[2]) in OPS]
    assert found and all(op == expected for expected, op in found), report
    return model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_same_results(family: str, batch: dict[str, Tensor]) -> None:
    """Logits of a padded prompt, of its parts through the cache, and the tokens that generate chooses."""
    model = build(family).eval()
    kept = batch["attention_mask"].bool()
    expected, tokens = model(**batch).logits, model.generate(**batch, max_new_tokens=12, do_sample=False)
    patched(model)
    torch.testing.assert_close(model(**batch).logits[kept], expected[kept], rtol=1e-3, atol=1e-3)
    assert torch.equal(model.generate(**batch, max_new_tokens=12, do_sample=False), tokens)
    copy = deepcopy(model)
    torch.testing.assert_close(copy(**batch).logits[kept], expected[kept], rtol=1e-3, atol=1e-3)
    ids = batch["input_ids"][1:]
    cache = None
    logits = []
    for part in ids.split([70, 1, 1, 18], 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), model(ids).logits, rtol=1e-3, atol=1e-3)
    torch_infini.unpatch_model(model)
    assert torch.equal(model(**batch).logits, expected)


@torch.no_grad()
def test_half(batch: dict[str, Tensor]) -> None:
    """In bfloat16 the patched model is as near to float32 as the original."""
    model = build("qwen3_5_text").eval()
    exact = model(**batch).logits
    model.bfloat16()
    own = (model(**batch).logits - exact).norm()
    assert (patched(model)(**batch).logits - exact).norm() < 1.2 * own


def test_hooks_and_gradients(batch: dict[str, Tensor]) -> None:
    """Hooks see the module's input and output; a backward runs through its own forward."""
    model = patched(build("qwen3_5_text").eval())
    seen = []
    handle = linear_attention(model).register_forward_hook(lambda module, args, output: seen.append(output.shape))
    with torch.no_grad():
        model(**batch)
    assert seen == [(2, 90, 64)]
    handle.remove()
    model(**batch).logits.square().mean().backward()
    assert linear_attention(model).A_log.grad.isfinite().all()


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "infini"])
@torch.no_grad()
def test_compiled(backend: str, batch: dict[str, Tensor]) -> None:
    model = patched(build("qwen3_5_text").eval())
    ids = batch["input_ids"]
    expected = model(ids).logits
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend=backend)(ids).logits, expected, rtol=1e-3, atol=1e-3)


def test_other_activation() -> None:
    """A convolution with another activation than silu is left, with the reason."""
    model = build("qwen3_5_text").eval()
    for layer in model.model.layers:
        if "linear_attn" in layer._modules:
            layer.linear_attn.activation = "gelu"
    rows = [row for row in torch_infini.patch_model(model).rows if row.name.endswith("linear_attn")]
    assert rows and all(row.reason == "the activation of its convolution is gelu, not silu" for row in rows)
