"""Models that read images beside text: folders of them, and their tokens with and without images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.rounding import assert_likeliest, sums_of
from torch_infini import LLM, SamplingParams
from torch_infini.testing.image_models import GEMMA3, IMAGE_FAMILIES, ImageFamily

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

EVERY = pytest.mark.parametrize("family", (*IMAGE_FAMILIES, GEMMA3), ids=lambda family: family.kind)
COUNT = 8


def greedy(count: int = COUNT) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


@EVERY
def test_folders_of_text(family: ImageFamily, tmp_path: Path) -> None:
    """A folder continues texts, dense and quantized, in recorded steps."""
    model = family.save(tmp_path)
    given = [[5, 6, 7], list(range(40, 75))]
    llm = LLM(tmp_path, block_size=4, chunk_size=8)
    sums = sums_of(model.config.get_text_config())
    for prompt, output in zip(given, llm.generate(given, greedy()), strict=True):
        ids = torch.tensor([prompt + output.token_ids[:-1]])
        with torch.no_grad():
            scores = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        assert_likeliest(torch.tensor(output.token_ids), scores, *sums)
    assert llm.engine.model.is_recordable
    [output] = LLM(tmp_path, quantization="int8").generate(given[:1], greedy())
    assert len(output.token_ids) == COUNT
