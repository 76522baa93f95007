"""patch_model on every family it serves: what is replaced, the same tokens, logits as near to exact as before."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from support.rounding import assert_likeliest, assert_same_but_rounding, sums_of
from torch_infini.patch import patch_model, patched
from torch_infini.testing.patched_families import FAMILIES, Errors, Family, exact_logits, logits, prompts

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
KINDS = {
    "RMSNorm": "norms",
    "Attention": "attention",
    "GatedMLP": "mlp",
    "Experts": "mlp",
    "DecoderLayer": "layers",
    "RotaryEmbedding": "rotary",
    "Linear": "head",
}


@EVERY
def test_float32(family: Family) -> None:
    """Every site is replaced, logits and greedy tokens are the original's but for rounding, also behind padding."""
    model, ids = family.build(), prompts()
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    few, padding = ids[:4].masked_fill(mask[:4] == 0, 0), mask[:4]

    def generate() -> torch.Tensor:
        return model.generate(few, attention_mask=padding, max_new_tokens=128, do_sample=False)

    expected, sums = logits(model, ids), sums_of(model.config)
    with patched(model) as report:
        kinds = Counter(KINDS[type(model.get_submodule(row.name)).__mro__[1].__name__] for row in report.replaced)
        assert {kind: kinds[kind] for kind in family.sites} == family.sites
        assert not report.left
        assert_same_but_rounding(logits(model, ids), expected, *sums)
        made = generate()
    assert torch.equal(logits(model, ids), expected)
    new = made[:, ids.shape[1] :]
    assert new.shape == (4, 128)
    seen = torch.nn.functional.pad(padding, (0, 127), value=1)
    with torch.no_grad():
        scores = model(
            made[:, :-1], attention_mask=seen, position_ids=(seen.cumsum(-1) - 1).clamp(min=0), use_cache=False
        ).logits[:, ids.shape[1] - 1 :]
    assert_likeliest(new, scores, *sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@EVERY
def test_half(family: Family, dtype: torch.dtype) -> None:
    """The error against float64, mean and 99th percentile over 16 prompts, is at most 1.05 times the original's own."""
    ids, model = prompts(), family.build(dtype)
    exact = exact_logits(family, dtype, ids)
    before = Errors.of(logits(model, ids), exact)
    patch_model(model)
    after = Errors.of(logits(model, ids), exact)
    assert after.mean <= 1.05 * before.mean and after.percentile <= 1.05 * before.percentile
