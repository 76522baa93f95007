"""Options of patch_model, and what happens in between: interrupts, a second call, where weights are moved to.

Tokens and numbers are compared with those of the same model before it was patched.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.rounding import rounding_limit, sums_of
from support.tiny_llama import LAYERS, calls, close, greedy, identity, in_order, logits, tiny, tokens
from torch_infini.patch import is_patched, patch_model, patched, unpatch_model
from torch_infini.patch.layers.memory import move

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread", "no_graphs_left")

Model = Any

# Options


def test_context() -> None:
    model, ids = tiny(), tokens()
    before, expected = identity(model), logits(model, ids)
    with patched(model, skip=["lm_head"]) as report:
        assert is_patched(model) and [row.name for row in report.left] == ["lm_head"]
        with pytest.raises(ValueError, match="model must not be patched already"), patched(model):
            pass
        assert is_patched(model)
    assert identity(model) == before
    with pytest.raises(ZeroDivisionError), patched(model):
        1 / 0  # noqa: B018
    assert identity(model) == before
    with patched(model):  # undone in the body
        unpatch_model(model)
    assert identity(model) == before and torch.equal(logits(model, ids), expected)
    with patched(nn.Linear(2, 2)) as report:
        assert report.reason
    with pytest.raises(ValueError, match="strict=True"), patched(nn.Linear(2, 2), strict=True):
        pass
    with pytest.raises(TypeError), patched(None):
        pass


def test_only_and_skip() -> None:
    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    cases: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"only": []}, {}),
        ({"only": ["lm_head"]}, {"linear": 1}),
        ({"only": ["*.mlp"], "skip": ["model.layers.1"]}, {"fused_linear": 1, "linear": 1, "swiglu": 1}),
        ({"skip": ["*"]}, {}),
        ({"skip": ["model"]}, {"linear": 1}),
        ({"only": ["*norm"]}, {"rms_norm": 2 * LAYERS + 1}),
        ({"only": ["*norm", "model.layers.?"]}, {"rms_norm": 1, "add_rms_norm": 2 * LAYERS}),
    ]
    for options, counts in cases:
        with patched(model, **options) as report:
            assert calls(model, ids) == counts, options
            close(logits(model, ids), expected)
            assert torch.equal(greedy(model), greedy(model, use_cache=False))
            assert all("skip=" in row.reason or "only" in row.reason or "was left" in row.reason for row in report.left)
    for name in ("only", "skip"):
        for wrong in ("lm_head", [1]):
            with pytest.raises(TypeError, match=f"patch_model: {name} must be a sequence of patterns, got"):
                patch_model(model, **{name: wrong})
    with pytest.raises(ValueError, match=r"strict=True, but these would be left: lm_head \(skip='lm_head'\)"):
        patch_model(model, skip=["lm_head"], strict=True)
    assert in_order(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [None, "int8", "packed"])
def test_verify(dtype: torch.dtype, weights: str | None) -> None:
    model, ids = tiny(dtype), tokens()
    report = patch_model(model, verify=True, weights=weights, strict=True)
    found = report.verification
    assert found is not None and found.tokens == 64
    if weights != "int8":
        exact = rounding_limit(logits(model, ids), *sums_of(model.config))
        assert found.difference <= (exact if dtype == torch.float32 else 2 * found.original_difference)
        assert found.agreement >= 0.9
    else:
        assert 1e-4 < found.difference < 2
    assert (found.original_difference > 0) == (dtype == torch.bfloat16)
    assert "verified: largest logit difference" in str(report)
    assert patch_model(model).verification == found and logits(model, ids).dtype == dtype


@pytest.mark.parametrize("weights", [None, "int8", "packed"])
def test_verify_that_fails(weights: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while the patched model is measured undoes the patch, unless weights were quantized."""
    from torch_infini.patch.checks.verification import Measurement

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Measurement, "compare", interrupted)
    model = tiny(torch.bfloat16 if weights == "packed" else torch.float32)
    before, state = identity(model), {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        patch_model(model, verify=True, weights=weights)
    assert is_patched(model) == (weights == "int8")
    if weights is None:
        assert identity(model) == before
    if weights == "packed":
        assert in_order(model) and all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("call", [0, 1, 5, 13])
@pytest.mark.parametrize("function", ["Verifier.plan", "Answer.make", "swap", "link", "register"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_interrupted(monkeypatch: pytest.MonkeyPatch, function: str, call: int, weights: str | None) -> None:
    """KeyboardInterrupt anywhere before the first weight is freed changes nothing."""
    import torch_infini.patch.apply as apply
    from torch_infini.patch.checks.verify import Verdict, Verifier
    from torch_infini.patch.layers import interface

    owners = {"Answer.make": Verdict, "Verifier.plan": Verifier, "swap": apply, "link": apply, "register": interface}
    owner: Any = owners[function]
    name = function.rpartition(".")[2]
    real, count = getattr(owner, name), iter(range(1000))
    happened = []

    def interrupted(*args: Any) -> Any:
        if next(count) == call:
            happened.append(call)
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(owner, name, interrupted)
    model, ids = tiny(intermediate_size=128).train(), tokens()
    before, expected = identity(model), logits(model, ids)
    try:
        patch_model(model, weights=weights)
    except KeyboardInterrupt:
        assert happened
        assert identity(model) == before and not is_patched(model) and in_order(model)
        assert torch.equal(logits(model, ids), expected)
    else:
        assert not happened
    monkeypatch.undo()
    if happened:
        patch_model(model, strict=True)
        close(logits(model, ids), expected)


def test_patched_already() -> None:
    """The model, a part of it, and a wrapper around it."""
    peft = pytest.importorskip("peft")
    model, ids = tiny(), tokens()
    patch_model(model)
    expected = logits(model, ids)
    assert patch_model(model, weights="int8", verify=True).already_patched
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for one in (adapted, model.model, nn.ModuleDict({"inside": model})):
        before = identity(model)
        assert is_patched(one) and patch_model(one).already_patched and identity(model) == before
    close(logits(adapted, ids), expected)
    unpatch_model(adapted)
    assert not any(map(is_patched, (adapted, model, model.model))) and in_order(adapted)
    close(logits(adapted, ids), expected)


@pytest.mark.parametrize("argument", ["only", "skip"])
def test_patterns_that_match_nothing(argument: str) -> None:
    """A misspelt name is an error."""
    peft = pytest.importorskip("peft")
    model = tiny()
    adapted = peft.get_peft_model(tiny(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    cases = [
        (model, "lm_haed", "lm_head"),
        (model, "model.layers.1.mpl", "model.layers.1.mlp"),
        (model, "model.layers.0.self_attention.*", "model.layers.0.self_attn"),
        (model, "*.attention", "self_attn"),
        (model, "nonsense", ""),
        (model, "", ""),
        (adapted, "lm_head", "base_model.model.lm_head"),
    ]
    for one, pattern, wanted in cases:
        before = identity(one)
        for more in ([], ["*norm"]):
            with pytest.raises(ValueError) as caught:
                patch_model(one, weights="int8", verify=True, **{argument: [*more, pattern]})
            head, _, nearest = str(caught.value).partition("; the nearest names are ")
            assert head == (
                f"torch_infini.patch_model: every pattern of {argument} must match the name of a module of the model "
                f"(fnmatch, as in model.named_modules()), got {pattern!r}"
            )
            names = nearest.split(", ")
            assert len(names) == 3 and all(one.get_submodule(name) is not one for name in names)
            assert wanted in nearest
        assert identity(one) == before and not is_patched(one)
    with pytest.raises(ValueError, match="got 'lm_haed'"), patched(model, **{argument: ["lm_haed"]}):
        pass
    # Modules that no op serves may be named, and models that are none of ours stay as they are.
    with patched(model, **{argument: ["model.embed_tokens", "*.act_fn"]}):
        pass
    assert patch_model(nn.Linear(2, 2), **{argument: ["lm_head"]}).reason


def test_misaligned_weights_get_memory_of_their_own() -> None:
    """Tensors mapped from a checkpoint file are not aligned to cache lines; patching aligns them."""
    model, ids = tiny(tie_word_embeddings=True), tokens()
    expected = logits(model, ids)
    linear = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]

    def misaligned(weight: Tensor) -> Tensor:
        """As a mapped file gives it: a memory that is the weight's alone and begins where it will."""
        data = bytearray(weight.nbytes + 64)
        start = next(i for i in range(0, 64, 4) if torch.frombuffer(data, dtype=torch.uint8, offset=i).data_ptr() % 64)
        return torch.frombuffer(memoryview(data)[start : start + weight.nbytes], dtype=weight.dtype).view(weight.shape)

    for _, module in linear:
        module.weight.data = misaligned(module.weight).copy_(module.weight.data)
        assert module.weight.data_ptr() % 64 and module.weight.untyped_storage().nbytes() == module.weight.nbytes
    big = torch.empty(linear[0][1].weight.numel() + 1)
    linear[0][1].weight.data = big[1:].view(linear[0][1].weight.shape).copy_(linear[0][1].weight.data)
    parameters, places = list(model.parameters()), [m.weight.data_ptr() for _, m in linear]
    patch_model(model, skip=["model.layers.1"])
    for i, ((name, module), place) in enumerate(zip(linear, places, strict=True)):
        left = i == 0 or ".1." in name  # a part of a larger memory, and what is skipped
        assert (module.weight.data_ptr() == place) == left, name
        assert left or module.weight.data_ptr() % 64 == 0
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    close(logits(model, ids), expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("rows", [3, 700])  # 700 rows take more than a megabyte: large pages are asked for
def test_moved(rows: int) -> None:
    tensors = [
        torch.randn(rows, 500),
        torch.empty(0),
        torch.randn(7).bfloat16(),
        torch.nn.Parameter(torch.randn(rows, 3)),
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    move(tensors)
    for x, y in zip(before, tensors, strict=True):
        assert torch.equal(x, y) and y.is_contiguous() and (y.data_ptr() % 64 == 0 or not y.numel())
        assert y.untyped_storage().nbytes() == y.nbytes
