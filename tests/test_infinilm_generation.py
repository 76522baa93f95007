"""infinilm.cache_utils, and generation.utils for models that are written in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.infinilm_models import GREEDY, NEW, by_row, infini
from torch_infini.compat import infinicore
from torch_infini.compat.infinilm import cache_utils
from torch_infini.compat.infinilm.generation.utils import GenerationMixin, infini_to_numpy

pytestmark = pytest.mark.usefixtures("one_thread")


# cache_utils


@pytest.mark.parametrize("kind", ("infinicore", "torch"))
@pytest.mark.parametrize("sequence_dim", (1, 2))
def test_caches(kind: str, sequence_dim: int) -> None:
    """Tokens come in odd numbers; a growing cache moves, a fixed one does not."""
    make: Any = infinicore.from_torch if kind == "infinicore" else lambda tensor: tensor
    back: Any = torch.from_dlpack if kind == "infinicore" else lambda tensor: tensor
    config = type("Config", (), {"num_key_value_heads": 3})()
    for cache in (
        cache_utils.DynamicCache(config, sequence_dim=sequence_dim),
        cache_utils.StaticCache(config, 300, sequence_dim=sequence_dim),
    ):
        assert len(cache) == cache.get_seq_length() == cache.get_seq_length(1) == 0
        parts: list[list[tuple[Tensor, Tensor]]] = [[], []]
        places = set()
        for count in (5, 1, 1, 90, 1, 170):
            for layer in (0, 1):
                shape = (2, 3, count) if sequence_dim == 2 else (2, count, 3)
                new = torch.randn(*shape, 8), torch.randn(*shape, 4).bfloat16()
                new = new[0].transpose(0, 3).contiguous().transpose(0, 3), new[1]  # of any strides
                parts[layer].append(new)
                found = cache.update(make(new[0]), make(new[1]), layer)
                for got, want in zip(found, zip(*parts[layer], strict=True), strict=True):
                    assert torch.equal(back(got), torch.cat(want, sequence_dim))
                places.add((layer, found[0].data_ptr()))
        assert len(cache) == 2 and cache.get_seq_length(1) == 268
        assert (len(places) == 2) == isinstance(cache, cache_utils.StaticCache)
        keys, _ = cache[0]
        cache.crop(6)
        assert cache.get_seq_length() == 6 and torch.equal(back(cache[0][0]), back(keys).narrow(sequence_dim, 0, 6))
        cache.crop(-2)
        assert cache.get_seq_length() == 4
        cache.reset()
        assert cache.get_seq_length() == 0 and len(cache) == 2
    assert cache.get_max_cache_shape() == 300 and cache_utils.DynamicCache().get_max_cache_shape() == -1


def test_caches_refuse() -> None:
    config = type("Config", (), {"num_key_value_heads": 3})()
    cache = cache_utils.StaticCache(config, 4)
    keys = torch.ones(2, 3, 3, 8)
    cache.update(keys, keys, 0)
    for states, layer, message in (
        (torch.ones(2, 5, 3, 8), 0, r"key_states must have the config's 3 heads in dimension 1 \(sequence_dim= says"),
        (torch.ones(1, 3, 1, 8), 0, r"new keys or values must have shape \[2, 3, 1, 8\], as those before, got \[1, 3"),
        (torch.ones(2, 3, 2, 8), 0, "a sequence must have at most max_cache_len, 4, tokens, got 5"),
        (keys, 2, "layer_idx must be at most 1, the next layer, got 2"),
        (keys[0], 0, "must have four dimensions, alike but for the last"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.update(states, states, layer)
    assert cache.get_seq_length() == 3
    for arguments in ({"max_cache_len": 0}, {"max_cache_len": 4, "sequence_dim": 3}):
        with pytest.raises(ValueError, match="StaticCache.__init__: "):
            cache_utils.StaticCache(config, **arguments)


# generation.utils


class Attending(GenerationMixin):
    """One layer of attention over embeddings, with a cache: tokens depend on all that came before."""

    def __init__(self, rows: int = 60, size: int = 16) -> None:
        draw = torch.Generator().manual_seed(3)
        self.table = torch.randn(rows, size, generator=draw)
        self.places = torch.randn(200, size, generator=draw)
        self.query = torch.randn(size, size, generator=draw) / 4
        self.head = torch.randn(size, rows, generator=draw)
        self.seen: list[list[int]] = []
        self.config = type("Config", (), {"num_key_value_heads": 1, "eos_token_id": None})()

    def logits(self, ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        x = self.table[ids] + self.places[positions]
        keys, values = (x[:, None], self.table[ids][:, None])
        if cache is not None:
            keys, values = cache.update(keys, values, 0)
        scores = (x @ self.query)[:, None] @ keys.transpose(2, 3)
        past = keys.shape[2] - ids.shape[1]
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(past)
        return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ values)[:, 0] @ self.head


class WithCache(Attending):
    """On infinicore tensors."""

    def forward(self, input_ids: Any, position_ids: Any, past_key_values: Any = None, use_cache: bool = False) -> Any:
        assert use_cache and isinstance(input_ids, infinicore.Tensor)
        self.seen.append(input_ids.shape)
        return infinicore.from_torch(
            self.logits(torch.from_dlpack(input_ids), torch.from_dlpack(position_ids), past_key_values)
        )


class WithoutCache(Attending):
    """On torch tensors, all of them in every call; the logits of the last token in a tuple."""

    def forward(self, input_ids: Tensor, **more: Any) -> Any:
        self.seen.append(list(input_ids.shape))
        return (self.logits(input_ids, more["position_ids"], None)[:, -1],)


def test_generation_mixin() -> None:
    prompt = [[1, 2, 3], [50, 4, 4]]
    cached, whole = WithCache(), WithoutCache()
    steps = cached.generate(infini(prompt), GREEDY)
    plain = whole.generate(torch.tensor(prompt), top_k=1, max_new_tokens=NEW)
    assert all(isinstance(step, Tensor) for step in plain)
    assert by_row(steps) == torch.stack(plain, 1).tolist()
    assert cached.seen == [[2, 3]] + [[2, 1]] * (NEW - 1) and whole.seen == [[2, 3 + i] for i in range(NEW)]
    ids = torch.tensor(prompt)
    for step in plain:  # by the definition
        expected = whole.logits(ids, torch.arange(ids.shape[1])[None], None)[:, -1].argmax(-1)
        assert torch.equal(step, expected)
        ids = torch.cat((ids, step[:, None]), 1)

    rows = by_row(steps)
    assert len(set(rows[0])) > 2 and rows[0] != rows[1]
    end = rows[0][1]
    tokenizer = type("Tokenizer", (), {"eos_token_id": end})()
    ended = by_row(cached.generate(infini(prompt), GREEDY, tokenizer=tokenizer))
    width = len(ended[0])
    for row, tokens in zip(ended, rows, strict=True):
        until = tokens[: tokens.index(end) + 1] if end in tokens else tokens
        assert row == (until + until[-1:] * width)[:width]
    assert ended[0][1:] == [end] * (width - 1)
    cached.config.eos_token_id = end
    assert by_row(cached.generate(infini(prompt), GREEDY)) == ended
    assert by_row(cached.generate(infini(prompt), GREEDY, stop_on_eos=False)) == rows


def test_generation_mixin_draws() -> None:
    model = WithoutCache()
    prompt = torch.tensor([[1, 2, 3]])
    draw = lambda **more: torch.stack(model.generate(prompt, max_new_tokens=NEW, temperature=9.0, **more)).tolist()
    assert draw(seed=1) == draw(seed=1) != draw(seed=2) and draw() != draw()
    # Each token is that of its random number.
    generator = torch.Generator().manual_seed(1)
    ids = prompt
    for token in draw(seed=1, top_k=5, top_p=0.9):
        logits = model.logits(ids, torch.arange(ids.shape[1])[None], None)[0, -1]
        number = torch.rand(1, generator=generator).item()
        assert torch.ops.infini.random_sample_given(logits, number, 0.9, 5, 9.0) == token[0]
        ids = torch.cat((ids, torch.tensor([token])), 1)


def test_generation_mixin_refuses() -> None:
    model = WithoutCache()
    with pytest.raises(ValueError, match="max_new_tokens must be given where no end token is known, got None"):
        model.generate(torch.tensor([[1]]))
    with pytest.raises(ValueError, match=r"input_ids must be a tensor \[batch, tokens\], not empty, got \[2\]"):
        model.generate(torch.tensor([1, 2]), GREEDY)
    with pytest.raises(TypeError, match="max_tokens"):
        model.generate(torch.tensor([[1]]), max_tokens=3)
    model.forward = lambda input_ids: torch.ones(3)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"forward must give logits \[1, tokens, vocabulary\], got \[3\]"):
        model.generate(torch.tensor([[1]]), GREEDY)


def test_infini_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(3, 4)
    found = infini_to_numpy(infinicore.from_torch(values.T))
    assert found.tolist() == values.T.tolist()
    found[0, 0] = 9
    assert values[0, 0] != 9
    assert infini_to_numpy(infini([1, 2])._underlying).tolist() == [1, 2]
    monkeypatch.setattr(infinicore.Tensor, "to_numpy", infini_to_numpy)  # as scripts do
    assert infini([3]).to_numpy().tolist() == [3]
