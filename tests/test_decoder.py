"""Decoder: what a part of one's own costs in a model of ours: its class. A made-up norm and MLP, served by the engine.

The model is Llama's small one with both put in; transformers' model with the same parts says which tokens are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_infini
from torch_infini import SamplingParams
from torch_infini.engine import decode
from torch_infini.models import Decoder, Llama
from torch_infini.nn import DecoderLayer, Linear, RMSNorm
from torch_infini.testing.checkpoints import random_model

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7], [11] * 40, [5, 6] * 17, [3, 4, 5, 6, 7, 8, 9]]
NEW = 12


class MeanNorm(nn.Module):
    """y = x / mean(|x|) * weight: the made-up norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().mean(-1, keepdim=True) + 1e-6) * self.weight


class AfterMeanNorm(MeanNorm):
    """The same as a part of a Decoder, which adds the residual."""

    def after(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return self(residual), residual


class Squared(nn.Module):
    """y = down(relu(up(x))^2): a made-up MLP of linear layers, ours or torch's."""

    def __init__(self, up: Any, down: Any) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).square())


@pytest.fixture
def models(tmp_path: Path) -> tuple[Any, Decoder]:
    """transformers' model and ours, with the same weights and the same made-up parts."""
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path)
    read = Llama.from_pretrained(tmp_path)
    layers = []
    for layer, their in zip(read.layers, theirs.model.layers, strict=True):
        size, inner = their.mlp.up_proj.in_features, their.mlp.up_proj.out_features
        up, down = Linear(size, inner), Linear(inner, size)
        up.load(their.mlp.up_proj.weight.detach())
        down.load(their.mlp.down_proj.weight.detach())
        # The first norm stays RMSNorm, so that parts of both kinds are in one layer.
        layers.append(DecoderLayer(layer.attention_norm, layer.attention, AfterMeanNorm(size), Squared(up, down)))  # type: ignore[arg-type]
        their.post_attention_layernorm = MeanNorm(size)
        their.mlp = Squared(their.mlp.up_proj, their.mlp.down_proj)
    return theirs.eval(), Decoder(read.config, read.embed, layers, read.norm, read.head)


def expected(theirs: Any) -> list[list[int]]:
    def continued(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        whole = theirs.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None)
        return whole[0, len(prompt) :].tolist()

    return [continued(prompt) for prompt in PROMPTS]


def greedy(llm: torch_infini.LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_a_norm_and_an_mlp_of_ones_own(models: tuple[Any, Decoder]) -> None:
    """Alone, in a batch, behind reused prefixes, and preempted, the tokens are those of transformers' loop."""
    theirs, ours = models
    right = expected(theirs)
    assert not ours.kernels_only
    llm = torch_infini.LLM(ours, max_model_len=128, block_size=8, chunk_size=16)
    assert [greedy(llm, [prompt])[0] for prompt in PROMPTS] == right
    assert greedy(llm, PROMPTS) == right  # their prefixes are in the cache
    assert llm.engine.metrics().reused_tokens > 0
    few = torch_infini.LLM(ours, max_model_len=64, block_size=8, cache_blocks=9, chunk_size=16)
    assert greedy(few, PROMPTS[:2] * 4) == right[:2] * 4
    assert few.engine.metrics().preemptions > 0


def test_its_steps_are_recorded(models: tuple[Any, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []
    record = decode._record_ops

    def counted(*arguments: Any) -> Any:
        recorded.append(record(*arguments))
        return recorded[-1]

    monkeypatch.setattr(decode, "_record_ops", counted)
    theirs, ours = models
    assert greedy(torch_infini.LLM(ours, max_model_len=128), PROMPTS) == expected(theirs)
    assert recorded and ours.is_recordable


class FromNumpy(AfterMeanNorm):
    """A norm that no recorder can follow."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(super().forward(x).numpy())


def test_a_part_that_cannot_be_recorded(models: tuple[Any, Decoder]) -> None:
    theirs, ours = models
    for layer in ours.layers:
        layer.mlp_norm = FromNumpy(len(layer.mlp_norm.weight))  # type: ignore[assignment]
    assert greedy(torch_infini.LLM(ours, max_model_len=128), PROMPTS) == expected(theirs)
    assert not ours.is_recordable


def test_parts_replaced_in_a_llama(tmp_path: Path) -> None:
    """A part is an attribute: it may also be put in after the model is read."""
    theirs = random_model("llama")
    theirs.save_pretrained(tmp_path)
    ours = Llama.from_pretrained(tmp_path)
    assert ours.kernels_only
    size = theirs.config.hidden_size
    theirs.model.norm, ours.norm = MeanNorm(size), AfterMeanNorm(size)  # type: ignore[assignment]
    assert not ours.kernels_only
    assert greedy(torch_infini.LLM(ours, max_model_len=128), PROMPTS) == expected(theirs.eval())


def test_errors(models: tuple[Any, Decoder]) -> None:
    _, ours = models
    layers: Iterator[DecoderLayer] = iter(list(ours.layers)[:1])
    count = ours.config.num_hidden_layers
    with pytest.raises(
        ValueError, match=rf"Decoder: layers must be num_hidden_layers of the config, at least 1, {count}, got 1"
    ):
        Decoder(ours.config, ours.embed, layers, RMSNorm(4), ours.head)


def test_parts_that_are_none(models: tuple[Any, Decoder]) -> None:
    _, ours = models
    parts = list(ours.layers)
    with pytest.raises(ValueError, match=r"Decoder: a norm must have after\(x, residual\), .* got MeanNorm without it"):
        Decoder(ours.config, ours.embed, parts, MeanNorm(64), ours.head)  # type: ignore[arg-type]
    plain: Any = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"got Linear without attention_norm, attention, mlp_norm, mlp \(layer 1\)"):
        Decoder(ours.config, ours.embed, [parts[0], plain, *parts[2:]], ours.norm, ours.head)


def test_it_is_read_at_one_sitting() -> None:
    import torch_infini.models.decoder as module

    assert len(Path(str(module.__file__)).read_text().splitlines()) <= 300
