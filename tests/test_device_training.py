"""Training a small LLaMA on infini, and many ops: the CPU's bits, and no memory that grows."""

from __future__ import annotations

import gc
import os
import resource
import weakref
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.usefixtures("infini")


def small_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**shape, num_key_value_heads=2, vocab_size=64, max_position_embeddings=64)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def train(device: str, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the weights behind them on the CPU."""
    model = small_llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, 64, (4, 16), generator=generator).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


def test_llama_trains_as_on_the_cpu() -> None:
    """50 steps, bit for bit."""
    (losses, weights), (want_losses, want) = train("infini", 50), train("cpu", 50)
    assert losses == want_losses and losses[-1] < losses[0]
    assert [name for name in want if not weights[name].equal(want[name])] == []


def test_llama_generates_as_on_the_cpu() -> None:
    model = small_llama().eval()
    ids = torch.randint(0, 64, (2, 5))
    settings = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False}
    with torch.no_grad():
        want, logits = model.generate(ids, **settings), model(ids).logits
        model.to("infini")
        assert model(ids.to("infini")).logits.cpu().equal(logits)
        assert model.generate(ids.to("infini"), **settings).cpu().equal(want)


def resident() -> int:
    """Bytes that the process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps freed memory a while")
def test_many_ops_do_not_grow() -> None:
    """100,000 ops with results, views, in place and refused; 1 MiB is less than 11 bytes for each."""
    x, weight = torch.randn(8, 64, device="infini"), torch.ones(64, device="infini")
    wrong = torch.ones(3)

    def work(count: int) -> None:
        y = x.clone()
        for _ in range(count // 5):
            z = y + 1
            z.mul_(0.5)
            torch.ops.infini.rms_norm(z.view(4, 128)[:, :64], weight, 1e-6)
        for _ in range(count // 100):
            with pytest.raises(RuntimeError):
                y + wrong

    work(5_000)
    gc.collect()
    allocated, before = torch.accelerator.memory_allocated(), resident()
    work(100_000)
    gc.collect()
    assert torch.accelerator.memory_allocated() == allocated
    assert resident() - before <= 1 << 20


@pytest.mark.parametrize("where", ["cpu", "infini"])
def test_tensor_split_by_a_tensor(where: str) -> None:
    """Where its indices lie too, followed by autograd, in views."""
    x = torch.arange(10.0, requires_grad=True)
    here = x.detach().to("infini").requires_grad_()
    for indices, dim in ((torch.tensor([2, 5]), 0), (torch.tensor(3), 0), (torch.tensor([1, 1]), -1)):
        want, got = torch.tensor_split(x, indices, dim), torch.tensor_split(here, indices.to(where), dim)
        assert [part.tolist() for part in got] == [part.tolist() for part in want]
    (x.tensor_split(torch.tensor([4]))[1] * 3).sum().backward()
    (here.tensor_split(torch.tensor([4], device=where))[1] * 3).sum().backward()
    assert here.grad.tolist() == x.grad.tolist()
    with torch.no_grad():
        here.tensor_split(torch.tensor([2], device=where))[0].zero_()
    assert here.tolist() == [0, 0, *range(2, 10)]


@pytest.mark.parametrize(
    "way", [lambda m, d: m.to(d), lambda m, d: getattr(m, d)(), lambda m, d: m.to(d, torch.double)]
)
def test_modules_keep_their_parameters(way: Any) -> None:
    """To infini and back: an optimizer that was made before trains them, and tied weights stay tied."""
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    weight, before = model[0].weight, model[0].weight.tolist()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for device in ("infini", "cpu"):
        way(model, device)
        assert model[0].weight is weight and model[1].weight is weight and weight.device.type == device
        assert [p.tolist() for p in model.parameters()] == [before]
    way(model, "infini")(torch.tensor([1, 2], device="infini")).sum().backward()
    optimizer.step()
    assert weight.tolist() != before
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_a_parameter_that_cannot_be_swapped() -> None:
    layer = torch.nn.Linear(2, 2)
    weight, values = weakref.ref(layer.weight), layer.weight.tolist()
    kept = weight()
    with pytest.warns(UserWarning, match="infini: Linear.to gives the module new parameters.*weakref"):
        layer.to("infini")
    assert layer.weight.device.type == "infini" and layer.weight.tolist() == values and layer.weight is not kept
