"""The limits within which results are compared with torch's: other orders of sums keep to them, faults do not.

One of torch's sides stands for another CPU here: its products are added up in another order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.rounding import assert_clear, assert_likeliest, assert_same_but_rounding, rounding_limit
from support.tiny_llama import close, logits, tiny, tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def one_by_one(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear as one running float32 sum over k in a shuffled order: the least exact of the ways in use."""
    order = torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(0))
    y = torch.zeros(*x.shape[:-1], len(weight))
    for i in order.tolist():
        y += x[..., i, None].float() * weight[:, i].float()
    return (y if bias is None else y + bias).to(x.dtype)


def in_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear in parts of 24 of k, added up from the last one on."""
    parts = [a.float() @ b.float().t() for a, b in zip(x.split(24, -1), weight.split(24, -1), strict=True)]
    y = sum(reversed(parts))
    return (y if bias is None else y + bias).to(x.dtype)


ORDERS = pytest.mark.parametrize("linear", [one_by_one, in_parts])


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [5, 64, 1100])
def test_products(linear: Callable[..., Tensor], dtype: torch.dtype, k: int) -> None:
    """Another order passes; in float32 a product left out does not, nor do sums that are kept in a half type."""
    x, weight = torch.randn(40, k).to(dtype), torch.randn(300, k).to(dtype)
    exact = (x.double() @ weight.double().t()).to(dtype)
    assert_same_but_rounding(linear(x, weight), exact, terms=k)
    less = weight.clone()
    less[:, -1] = 0
    with pytest.raises(AssertionError, match="elements are off"):
        assert_same_but_rounding(linear(x, less), exact, terms=k)
    if dtype == torch.float32:
        less = weight.clone()
        less[5, k // 2] = 0
        with pytest.raises(AssertionError, match="elements are off"):
            assert_same_but_rounding(linear(x, less), exact, terms=k)
        halves = sum(
            a.bfloat16().float() for a in ((x[:, i : i + 64] @ weight[:, i : i + 64].t()) for i in range(0, k, 64))
        )
        with pytest.raises(AssertionError, match="elements are off"):
            assert_same_but_rounding(halves, exact, terms=k)


@ORDERS
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_models(linear: Callable[..., Tensor], tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients, with weights of any size."""
    pytest.importorskip("transformers")
    model, ids = tiny(tie_word_embeddings=tied), tokens(4, 33)

    def results() -> list[Tensor]:
        model.zero_grad()
        output = model(ids).logits
        output.square().mean().backward()
        return [output.detach(), *(p.grad.clone() for p in model.parameters())]

    for size in (1.0, 30.0):
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(size)
        expected = results()
        with monkeypatch.context() as patching:
            patching.setattr(F, "linear", linear)
            actual = results()
        assert not torch.equal(actual[0], expected[0])
        close(actual[0], expected[0])
        for a, b in zip(actual[1:], expected[1:], strict=True):
            close(a, b, passes=2)


def zeroed(place: str, *at: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        layer = model.get_submodule(place)
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        layer.weight.data[at] = 0

    return change


def other_eps(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5


def half_results(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, y: y.half().float())


def other_frequency(model: Any) -> None:
    model.model.rotary_emb.inv_freq[3] *= 1.01


FAULTS: dict[str, Callable[[Any], None]] = {
    "a column of a product": zeroed("model.layers.0.mlp.down_proj", slice(None), -1),
    "one product": zeroed("model.layers.1.mlp.down_proj", 5, 77),
    "eps of the norms": other_eps,
    "results rounded to float16": half_results,
    "one rope pair": other_frequency,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    pytest.importorskip("transformers")
    model, ids = tiny(), tokens()
    wrong = copy.deepcopy(model)
    FAULTS[fault](wrong)
    with pytest.raises(AssertionError, match="elements are off"):
        close(logits(wrong, ids), logits(model, ids))


def test_a_position_off_by_one_is_found() -> None:
    pytest.importorskip("transformers")
    model, ids = tiny(), tokens()
    positions = torch.arange(ids.shape[1]) + (torch.arange(ids.shape[1]) >= 5)
    with pytest.raises(AssertionError, match="elements are off"):
        close(logits(model, ids, position_ids=positions[None]), logits(model, ids))


def test_limits_follow_the_size_of_values() -> None:
    """Not of zeros, which stand for what was not computed; infinities and NaN must agree and do not count."""
    x = torch.randn(1000)
    limit = rounding_limit(x, 100, 3)
    assert rounding_limit(8 * x, 100, 3) == pytest.approx(8 * limit)
    assert rounding_limit(torch.cat((x, torch.zeros(9000))), 100, 3) == pytest.approx(limit)
    assert rounding_limit(torch.cat((x, torch.tensor([torch.inf, torch.nan]))), 100, 3) == pytest.approx(limit)
    assert rounding_limit(x, 400, 6) > 3 * limit
    other = x.clone()
    other[7] = torch.nan
    assert_same_but_rounding(other, other.clone(), 100)
    for a, b in ((other, x), (x, other), (x, x.double()), (x, x[None])):
        with pytest.raises(AssertionError):
            assert_same_but_rounding(a, b, 100)


def test_tokens() -> None:
    """A lead that is smaller than rounding: either token is a likeliest one, and neither is certain."""
    scores = torch.randn(4, 50).clamp(max=2)
    scores[:, 3] = 3
    tie = scores.clone()
    tie[2, 9] = 3 - rounding_limit(scores, 160, 13)
    assert_clear([scores], 160, 13)
    with pytest.raises(AssertionError, match="step 1: the likeliest token leads by"):
        assert_clear([scores, tie], 160, 13)
    assert_likeliest(torch.tensor([3, 3, 9, 3]), tie, 160, 13)
    with pytest.raises(AssertionError, match="1 of 4 tokens are not the likeliest"):
        assert_likeliest(torch.tensor([3, 3, 9, 3]), scores, 160, 13)
