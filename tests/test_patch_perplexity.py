"""What int8 and int4 weights cost the trained model of the demo: perplexity and top-1 agreement, beside bfloat16's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.scripts import script
from torch_infini import patch_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

from torch_infini.commands.demo_run import load  # noqa: E402
from torch_infini.demo import MODEL  # noqa: E402
from torch_infini.weights import best  # noqa: E402

WINDOW, WINDOWS = 256, 24


def windows(held_out: bool) -> Tensor:
    """[WINDOWS or fewer, WINDOW] token ids of the text that the model was trained on, or of what it has not seen."""
    _, tokenizer = load(Path(MODEL), torch.bfloat16)
    texts = script("benchmarks/train_demo").split_topics(0)[held_out]
    ids = [token for text in texts for token in tokenizer(text).input_ids]
    count = min(WINDOWS, len(ids) // WINDOW)
    assert count >= 8
    return torch.tensor(ids[: count * WINDOW]).view(count, WINDOW)


def measure(weights: str | None, ids: Tensor) -> tuple[float, Tensor]:
    """(perplexity, the likeliest next token at each position)."""
    model, _ = load(Path(MODEL), torch.bfloat16)
    report = patch_model(model, weights=weights)
    assert not report.left
    assert weights is None or any(row.op == f"linear_{best(weights, 'cpu').name}" for row in report.rows)
    with torch.no_grad():
        logits = model(ids).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return math.exp(loss), logits.argmax(-1)


@pytest.mark.parametrize("held_out", [False, True], ids=["seen", "held out"])
def test_perplexity(held_out: bool) -> None:
    """int8 within 1 % of bfloat16, int4 within 4 %; so is agreement on text that the model knows how to continue.

    On text that it never saw its best guesses are close to each other, so that agreement says little there.
    """
    ids = windows(held_out)
    perplexity, wanted = measure(None, ids)
    for weights, share in (("int8", 0.01), ("int4", 0.04)):
        quantized, guesses = measure(weights, ids)
        assert quantized <= perplexity * (1 + share), weights
        assert held_out or (guesses == wanted).float().mean() >= 1 - share, weights
