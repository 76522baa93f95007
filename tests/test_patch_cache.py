"""Patched models write into growing caches in place: no other use of the cache may be affected.

Every test runs the same steps with the unpatched model and with the patched one, and compares.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.rounding import greedy_tokens
from support.tiny_llama import close, logits, tiny, tokens
from torch_infini.patch import patch_model, patched, unpatch_model
from torch_infini.patch.layers import cache as patch_cache

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

Cache, Model = Any, Any


def feed(model: Model, cache: Cache, ids: Tensor, *counts: int) -> list[Tensor]:
    """Return the logits of calls with these numbers of tokens, appended to the cache."""
    results, start = [], cache.get_seq_length()
    for count in counts:
        results.append(logits(model, ids[:, start : start + count], past_key_values=cache))
        start += count
    return results


def begun(model: Model, *counts: int, batch: int = 2) -> Cache:
    """Return a cache filled with the first tokens of `tokens`, in calls with these numbers of tokens."""
    cache = transformers.DynamicCache(config=model.config)
    feed(model, cache, tokens(batch, 40), *counts)
    return cache


def held(cache: Cache) -> list[Tensor]:
    """The cache's tensors themselves."""
    return [x for layer in cache.layers for x in (layer.keys, layer.values)]


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in tensors]


def same(actual: list[Tensor], expected: list[Tensor], passes: int = 1) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        close(a, b, passes)


def both(steps: Callable[[Model], list[Tensor]], model: Model | None = None, passes: int = 1) -> None:
    """Run the steps unpatched, then patched, and compare all that they return; gradients are of two passes."""
    model = tiny() if model is None else model
    expected = steps(model)
    with patched(model, strict=True):
        same(steps(model), expected, passes)


def in_place(cache: Cache) -> bool:
    """Whether the cache's first layer is written into larger tensors."""
    return cache.layers[0].keys.untyped_storage().nbytes() > cache.layers[0].keys.nbytes


# What is fast


def test_grows_in_place() -> None:
    """One token after the other, up to the end of the buffers and beyond: few allocations, the original's values."""
    ids = torch.randint(2, 128, (2, 330), generator=torch.Generator().manual_seed(2))
    counts = (5, *[1] * 14, 238, *[1] * 20, 53)
    places: set[int] = set()

    def steps(model: Model) -> list[Tensor]:
        cache, results = transformers.DynamicCache(config=model.config), []
        for count in counts:
            results += feed(model, cache, ids, count)
            places.add(cache.layers[0].keys.data_ptr())
        return results + held(cache)

    model = tiny(max_position_embeddings=512)
    expected = steps(model)
    places.clear()
    with patched(model, strict=True):
        same(steps(model), expected)
    assert len(places) == 2  # buffers, larger buffers


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_crop_keeps_the_place(mode: Any) -> None:
    """Cropping at every step, as in assisted generation, copies nothing unless the cut tensors are still held."""
    with patched(tiny(), strict=True) as _, mode():
        model = tiny()
        patch_model(model)
        cache = begun(model, 5, 1, 1)
        places = [x.data_ptr() for x in held(cache)]
        for _ in range(4):
            feed(model, cache, tokens(length=40), 4)
            cache.crop(-3)
            feed(model, cache, tokens(length=40), 1)
            assert [x.data_ptr() for x in held(cache)] == places


def test_crop_without_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch cannot count the tensors that share a memory, a cropped cache is copied."""
    monkeypatch.setattr(patch_cache, "tensors_in", lambda x: None)
    model = tiny()
    with patched(model, strict=True):
        cache = begun(model, 5, 1)
        place = cache.layers[0].keys.data_ptr()
        cache.crop(-1)
        feed(model, cache, tokens(length=40), 1)
        assert cache.layers[0].keys.data_ptr() != place and in_place(cache)


def test_memory_is_given_back() -> None:
    """A layer with exchanged tensors frees the buffers that it no longer uses, once it grows again."""
    model = tiny()
    with patched(model, strict=True):
        cache = begun(model, 5, 1)
        grown = weakref.ref(cache.layers[0]._infini_growable)
        cache.reorder_cache(torch.tensor([1, 0]))
        feed(model, cache, tokens(length=40), 1)
        gc.collect()
        assert grown() is None
        before = cache.layers[0]._infini_growable
        cache.reset()
        feed(model, cache, tokens(length=40), 3, 1)
        assert cache.layers[0]._infini_growable is not before


# What is kept of a cache while it goes on


def test_old_references() -> None:
    """Tensors read from a cache keep their values while the cache grows."""

    def steps(model: Model) -> list[Tensor]:
        cache, kept = begun(model, 5, 1), []
        for count in (1, 3, 1):
            kept += held(cache)
            feed(model, cache, tokens(length=40), count)
        return kept

    both(steps)


@pytest.mark.parametrize("part", ["whole", "slice", "detached", "numpy", "iterator"])
def test_old_references_and_crop(part: str) -> None:
    """Snapshots, slices and arrays of a cache keep their values while it is cropped and continued with other tokens."""
    keep: Callable[[Tensor], Any] = {
        "whole": lambda x: x,
        "slice": lambda x: x[:, :, -2:],
        "detached": lambda x: x.detach(),
        "numpy": lambda x: x.numpy(),
        "iterator": lambda x: next(x.split(5, 2)[1:].__iter__()),
    }[part]

    def steps(model: Model) -> list[Tensor]:
        cache = begun(model, 5, 1, 1)
        kept = [keep(x) for x in held(cache)]
        cache.crop(-2)
        feed(model, cache, tokens(length=40).flip(1), 1, 2)
        return [torch.as_tensor(x) for x in kept] + held(cache)

    both(steps)


def test_branches() -> None:
    """Several continuations of one prefix, by exchanging the tensors of the layers: each keeps its own."""

    def steps(model: Model) -> list[Tensor]:
        cache = begun(model, 5, 1)
        prefix = [(layer.keys, layer.values) for layer in cache.layers]
        branches, results = [], []
        for shift in range(3):
            for layer, (keys, values) in zip(cache.layers, prefix):
                layer.keys, layer.values = keys, values
            results += feed(model, cache, tokens(length=40).roll(shift, 1), 1, 2)
            branches.append([(layer.keys, layer.values) for layer in cache.layers])
        for shift, branch in enumerate(branches):
            for layer, (keys, values) in zip(cache.layers, branch):
                layer.keys, layer.values = keys, values
            results += feed(model, cache, tokens(length=40).roll(-shift, 1), 1)
        return results

    both(steps)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "shallow layers": lambda cache: shallow(cache),
    "ddp data": lambda cache: transformers.DynamicCache([(layer.keys, layer.values) for layer in cache.layers]),
}


def shallow(cache: Cache) -> Cache:
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("kind", COPIES)
def test_copies(kind: str) -> None:
    """A copy and its original go on with different tokens, and so does a copy of the copy when both are gone."""

    def steps(model: Model) -> list[Tensor]:
        one = begun(model, 5, 1)
        two = COPIES[kind](one)
        ids, other = tokens(length=40), tokens(length=40).flip(1)
        results = feed(model, two, other, 1) + feed(model, one, ids, 2) + feed(model, two, other, 1, 1)
        results += feed(model, one, ids, 1) + held(one) + held(two)
        three = COPIES[kind](two)
        del one, two
        gc.collect()
        four = COPIES[kind](three)
        results += feed(model, four, ids, 1, 1) + feed(model, three, other, 1, 1) + held(three)
        return results

    both(steps)


def test_a_copy_at_the_address_of_its_original() -> None:
    """Layers are told apart by identity, not by an address that another one gets later."""
    model = tiny()
    with patched(model, strict=True):
        one = begun(model, 5, 1).layers[0]
        grown = one._infini_growable
        two = copy.copy(one)
        assert grown.fits(one, 7) and not grown.fits(two, 7)
        del one
        gc.collect()
        assert not any(grown.fits(layer, 7) for layer in [two, *(copy.copy(two) for _ in range(20))])


def test_a_copy_does_not_copy_the_buffers() -> None:
    """deepcopy and pickle copy the tensors of the layer, and not its buffers as well."""
    model = tiny()
    with patched(model, strict=True):
        cache = begun(model, 5, 1)
        for clone in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert all(layer._infini_growable is None for layer in clone.layers)
            same(held(clone), held(cache))
        file = io.BytesIO()
        torch.save(cache, file)
        file.seek(0)
        same(held(torch.load(file, weights_only=False)), held(cache))


# What else is done to caches


OPERATIONS: dict[str, Callable[[Any], None]] = {
    "crop": lambda cache: cache.crop(-2),
    "crop to nothing": lambda cache: cache.crop(-cache.get_seq_length()),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "select by slice": lambda cache: cache.batch_select_indices(slice(0, 2)),
    "repeat and select": lambda cache: (
        cache.batch_repeat_interleave(2),
        cache.batch_select_indices(torch.tensor([0, 3])),
    ),
    "reset": lambda cache: cache.reset(),
    "written to": lambda cache: [x.mul_(0.5) for x in held(cache)],
    "turned": lambda cache: [
        setattr(layer, name, getattr(layer, name).transpose(1, 2).contiguous().transpose(1, 2))
        for layer in cache.layers
        for name in ("keys", "values")
    ],
    "only the first layer cropped and grown": lambda cache: (
        cache.layers[0].crop(-1),
        cache.layers[0].update(*(x[:, :, -1:] * 2 for x in held(cache)[2:4])),
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(operation: str) -> None:
    def steps(model: Model) -> list[Tensor]:
        cache = begun(model, 5, 1)
        results = []
        for _ in range(2):
            OPERATIONS[operation](cache)
            results += feed(model, cache, tokens(length=40).flip(1), 1, 2, 1)
        return results + held(cache)

    both(steps)


def test_batch_sizes() -> None:
    """A cache that is repeated, or of which rows are taken, goes on with another batch."""

    def steps(model: Model) -> list[Tensor]:
        cache = begun(model, 5, 1)
        results = feed(model, cache, tokens(2, 40), 1)
        cache.batch_repeat_interleave(2)
        results += feed(model, cache, tokens(4, 40), 1, 1)
        cache.batch_select_indices(slice(0, 1))
        results += feed(model, cache, tokens(1, 40), 1, 2)
        return results + held(cache)

    both(steps)


@pytest.mark.parametrize("batch", [1, 3])
def test_wrong_batch(batch: int) -> None:
    """A batch that does not fit is an error, as with the original, and the cache stays what it was."""
    model = tiny()
    for patching in (False, True):
        if patching:
            patch_model(model)
        cache = begun(model, 5, 1)
        before = copies(held(cache))
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            feed(model, cache, tokens(batch, 40), 1)
        same(held(cache), before)


def test_dtypes() -> None:
    """A model that changes its dtype in a conversation fails as the original does, and does not convert in silence."""
    model = tiny()
    for patching in (False, True):
        if patching:
            patch_model(model)
        cache = begun(model.float(), 5, 1)
        with pytest.raises(RuntimeError, match="dtype"):
            feed(model.bfloat16(), cache, tokens(length=40), 1)
        for layer in cache.layers:  # and goes on when the cache follows
            layer.reset()
        feed(model, cache, tokens(length=40), 4, 1)
        assert {x.dtype for x in held(cache)} == {torch.bfloat16}


def test_modes() -> None:
    """no_grad, inference_mode and frozen parameters with gradients on, one after the other and in any order."""
    modes = [torch.no_grad, torch.inference_mode, torch.enable_grad]

    def steps(model: Model) -> list[Tensor]:
        results = []
        for first in modes:
            for second in modes:
                cache, start = transformers.DynamicCache(config=model.config), 0
                for mode, count in ((first, 4), (first, 1), (second, 1), (second, 1), (first, 1), (first, 1)):
                    with mode():
                        ids = tokens()[:, start : start + count]
                        results.append(model(ids, past_key_values=cache).logits.clone())
                    start += count
        return results

    both(steps, tiny().requires_grad_(False))


def test_training_on_a_prefix() -> None:
    """A cached prefix, and a step of training on what follows it."""

    def steps(model: Model) -> list[Tensor]:
        cache = begun(model, 4, 1)
        model.zero_grad()
        model(tokens(length=40)[:, 5:9], past_key_values=cache).logits.square().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        cache.crop(-4)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        return gradients + feed(model, cache, tokens(length=40), 1, 1)

    both(steps, passes=2)


def test_gradients_into_the_cache() -> None:
    """Learned keys and values before the prompt of a frozen model, as prefix tuning has them, get their gradients."""
    g = torch.Generator().manual_seed(5)
    prefix = [torch.randn(2, 2, 3, 16, generator=g).requires_grad_() for _ in range(4)]

    def steps(model: Model) -> list[Tensor]:
        cache = transformers.DynamicCache(list(zip(prefix[::2], prefix[1::2], strict=True)))
        output = model(tokens()[:, :4], past_key_values=cache).logits
        results = [output.detach(), *torch.autograd.grad(output.square().mean(), prefix)]
        assert all(gradient.abs().max() > 0 for gradient in results[1:])
        return results

    both(steps, tiny().requires_grad_(False), passes=2)


def test_two_models() -> None:
    """A cache that goes from a patched model to another one, to an unpatched one, and back."""
    ids = tokens(length=40)
    one, two = tiny(), tiny(seed=2)

    def steps(first: Model, second: Model) -> list[Tensor]:
        cache = begun(first, 4, 1)
        results = []
        for count in (1, 2, 1):
            results += feed(second, cache, ids, count) + feed(first, cache, ids, 1)
        cache.crop(-3)
        return results + feed(second, cache, ids, 1) + feed(first, cache, ids, 1) + held(cache)

    expected = steps(one, two)
    patch_model(one)
    same(steps(one, two), expected)
    patch_model(two, only=["model.layers.1*"])
    same(steps(one, two), expected)
    unpatch_model(one)
    same(steps(one, two), expected)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize("reuse", ["go on", "crop", "copies"])
def test_conversation(reuse: str, padded: bool) -> None:
    """generate, turn after turn, on one cache: the whole conversation is given each time, and only its end computed."""
    first, more = tokens(2, 6), tokens(2, 4).flip(1)
    start = torch.ones_like(first)
    if padded:
        start[0, :2] = 0
        first = first.masked_fill(start == 0, 0)

    def steps(model: Model) -> list[Tensor]:
        cache = transformers.DynamicCache(config=model.config)
        text, mask, results = first, start, []
        for turn in range(3):
            if reuse == "copies":
                cache = copy.deepcopy(cache)
            text = greedy_tokens(
                model, text, attention_mask=mask, past_key_values=cache, max_new_tokens=5, eos_token_id=None
            )
            results.append(text)
            if reuse == "crop":  # the last answer is taken back
                cache.crop(-2)
                text = text[:, : cache.get_seq_length()]
            text = torch.cat((text, more.roll(turn, 1)), 1)
            mask = torch.nn.functional.pad(start, (0, text.shape[1] - start.shape[1]), value=1)
        return results

    model = tiny()
    expected = steps(model)
    with patched(model, strict=True):
        for actual, wanted in zip(steps(model), expected, strict=True):
            assert torch.equal(actual, wanted)


# Other caches


class Halved(transformers.cache_utils.DynamicLayer):
    """Keeps half precision and gives back full, as quantized caches do."""

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(k.bfloat16(), v.bfloat16())
        return keys.to(k.dtype), values.to(v.dtype)


class Renamed(transformers.DynamicCache):
    """Counts its updates."""

    updates = 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        Renamed.updates += 1
        return super().update(*args, **kwargs)


OTHER: dict[str, Callable[[Any], Any]] = {
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=24),
    "own layers": lambda config: transformers.Cache(layer_class_to_replicate=Halved),
    "own update": lambda config: Renamed(config=config),
    "no config": lambda config: transformers.DynamicCache(),
    "sliding": lambda config: transformers.Cache(
        layers=[transformers.cache_utils.DynamicSlidingWindowLayer(64) for _ in range(config.num_hidden_layers)]
    ),
}


@pytest.mark.parametrize("kind", OTHER)
def test_other_caches(kind: str) -> None:
    def steps(model: Model) -> list[Tensor]:
        cache = OTHER[kind](model.config)
        ids, results, start = tokens(length=40), [], 0
        for count in (4, 1, 3, 1):
            results.append(logits(model, ids[:, start : start + count], past_key_values=cache))
            start += count
        return results

    Renamed.updates = 0
    both(steps)
    assert Renamed.updates == (2 * 2 * 4 if kind == "own update" else 0)


def test_offloaded_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that moves its layers between devices sees every update; here the second device is the first one."""

    class Stream:
        def wait_stream(self, other: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *error: Any) -> None: ...

    moved: list[Any] = []
    layer = transformers.cache_utils.DynamicLayer
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: Stream())
    monkeypatch.setattr(layer, "offload", lambda self: moved.append((self, self.keys.clone())))

    def steps(model: Model) -> list[Tensor]:
        moved.clear()
        cache = transformers.DynamicCache(config=model.config, offloading=True)
        results = feed(model, cache, tokens(length=40), 4, 1, 2, 1)
        assert [cache.layers.index(layer) for layer, _ in moved] == [0, 1] * 4
        return results + [keys for _, keys in moved]

    both(steps)


def test_static_decode_reads_nothing_back() -> None:
    """A step reads no values from tensors, or it could not be captured in a CUDA graph; fake tensors have none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = tiny()
    patch_model(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3, 4]]), past_key_values=cache)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = model(input_ids=torch.tensor([[5]]), past_key_values=cache, position_ids=torch.tensor([[4]]))
    assert fake.logits.shape == (1, 1, model.config.vocab_size)
