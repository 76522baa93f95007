"""Training a small LLaMA on infini, and many ops: the CPU's bits, and no memory that grows."""

from __future__ import annotations

import gc
import os
import resource
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
