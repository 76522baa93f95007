"""LLM.score and LLM.classify: the logits of transformers' sequence classifiers, for pairs of texts and single ones."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import AutoModelForSequenceClassification, AutoTokenizer

from support.encoders import CLS, SEP, reference, save_encoder
from torch_infini import LLM, AsyncLLM

pytestmark = pytest.mark.usefixtures("one_thread")
HEAD = "ForSequenceClassification"
QUERY = "how tall"
DOCUMENTS = ["it is 5 m tall", "red", "", "a text that is much longer than all of the others are"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("model"), "bert", HEAD, num_labels=1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, progress=False)


@torch.no_grad()
def logits_of(folder: Path, *texts: str) -> Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = AutoTokenizer.from_pretrained(folder)(*([text] for text in texts), return_tensors="pt")
    logits: Tensor = model(**inputs).logits[0].double()
    return logits


def close(found: Any, wanted: Tensor, error: float = 2e-5) -> None:
    assert float((torch.as_tensor(found).double() - wanted).abs().max()) <= error


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert"])
def test_scores_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Of documents of several lengths together; of BERT with types of tokens."""
    folder = save_encoder(tmp_path, family, HEAD, num_labels=1)
    llm = LLM(folder, progress=False)
    wanted = torch.stack([logits_of(folder, QUERY, text) for text in DOCUMENTS])[:, 0]
    close([one.outputs.score for one in llm.score(QUERY, DOCUMENTS, use_activation=False)], wanted)
    close([one.outputs.score for one in llm.score(QUERY, DOCUMENTS)], wanted.sigmoid())
    for text, want in zip(DOCUMENTS, wanted, strict=True):
        close([llm.score(QUERY, text)[0].outputs.score], want.sigmoid()[None], 2e-6)
    embedded = torch.tensor(llm.embed([5, 6, 7])[0].outputs.embedding, dtype=torch.float64)
    close(embedded, reference(folder, [5, 6, 7], "mean"))
    assert llm.engine.is_idle


def test_types_change_scores(folder: Path, llm: LLM) -> None:
    """Otherwise the tests above would not see that they are lost."""
    ids, types = llm.engine.prompts.encode_pair("a", "b", llm.engine.score_params())
    assert types == [0, 0, 0, 1, 1] and ids[0] == CLS and ids[2] == ids[4] == SEP
    plain = llm.classify([ids], use_activation=False)[0].outputs.probs[0]
    assert abs(plain - llm.score("a", "b", use_activation=False)[0].outputs.score) > 1e-4


def test_pairs(folder: Path, llm: LLM) -> None:
    both = llm.score(["a", "b"], ["c", "d"], use_activation=False)
    close(
        [one.outputs.score for one in both],
        torch.stack([logits_of(folder, "a", "c"), logits_of(folder, "b", "d")])[:, 0],
    )
    assert llm.score("a", []) == [] and len(llm.score("a", "b")) == 1 and len(llm.score(["a"], ["b", "c"])) == 2
    cut = llm.score("abc", "d" * 200, truncate_prompt_tokens=10)[0].prompt_token_ids
    assert cut == llm.score("abc", "dddd")[0].prompt_token_ids and len(cut) == 10
    assert len(llm.score("abc", "d" * 200, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 130
    with pytest.raises(ValueError, match=r"prompt must be at most 130 tokens, .* got 206 \(prompt 1\)"):
        llm.score("abc", ["d", "d" * 200])
    for given in ((5, ["a"]), ("a", 5), ("a", [5]), (["a", "b"], ["c"]), (None, "a"), ([], ["a"])):
        with pytest.raises(ValueError, match="torch_infini.LLM.score: (queries|documents) must be"):
            llm.score(*given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use_activation must be True, False or None, got 'no'"):
        llm.score("a", "b", use_activation="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="truncate_prompt_tokens must be"):
        llm.score("a", "b", truncate_prompt_tokens=0)


def test_activations(folder: Path, tmp_path: Path) -> None:
    """That which a folder of sentence-transformers names: in any of three places."""
    save_encoder(tmp_path, "bert", HEAD, num_labels=1)
    config = json.loads((tmp_path / "config.json").read_text())
    want = logits_of(tmp_path, "a", "b")
    identity = "torch.nn.modules.linear.Identity"
    for more, other in (
        ({"sentence_transformers": {"activation_fn": identity}}, {}),
        ({"sbert_ce_default_activation_function": identity}, {}),
        ({}, {"activation_fn": identity}),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(other))
        close([LLM(tmp_path, progress=False).score("a", "b")[0].outputs.score], want)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"activation_fn": "my.Wave"}))
    llm = LLM(tmp_path, progress=False)
    with pytest.raises(ValueError, match="use_activation must be False, for the folder's is none of Identity.*: Wave"):
        llm.score("a", "b")
    close([llm.score("a", "b", use_activation=False)[0].outputs.score], want)


def test_classes(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "bert", HEAD, num_labels=3)
    llm = LLM(folder, progress=False)
    found = llm.classify(["a", "bcd"])
    for output, text in zip(found, ("a", "bcd"), strict=True):
        close(output.outputs.probs, logits_of(folder, text).softmax(-1))
        assert output.outputs.num_classes == 3
    close(llm.classify("a", use_activation=False)[0].outputs.probs, logits_of(folder, "a"))
    with pytest.raises(ValueError, match="model must be a cross-encoder, a classifier with one label .*got 3 labels"):
        llm.score("a", "b")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "problem_type": "multi_label_classification"}))
    close(LLM(folder, progress=False).classify("a")[0].outputs.probs, logits_of(folder, "a").sigmoid())


def test_other_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM, folder: Path) -> None:
    other = LLM(save_encoder(tmp_path), progress=False)
    with pytest.raises(ValueError, match="model must be a cross-encoder, .* got a model without a classifier"):
        other.score("a", "b")
    with pytest.raises(ValueError, match=r"model must be a classifier \(.*\), got a model without a classifier"):
        other.classify("a")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    loaded = LLM(model, tokenizer=folder, progress=False)
    close([loaded.score("a", "b")[0].outputs.score], logits_of(folder, "a", "b").sigmoid())
    classify = llm.engine.model.classify  # type: ignore[attr-defined]
    monkeypatch.setattr(llm.engine.model, "classify", lambda *given: [one / 0 for one in classify(*given)])
    with pytest.raises(RuntimeError, match="the prompt's scores must be finite"):
        llm.score("a", "b", use_activation=False)
    assert llm.engine.is_idle


def test_quantized(folder: Path, llm: LLM) -> None:
    """The encoder alone: the head stays dense."""
    small = LLM(folder, progress=False, quantization="int8")
    assert type(small.engine.model.model.classifier).__name__ == "Linear"  # type: ignore[attr-defined]
    found = [one.outputs.score for one in small.score(QUERY, DOCUMENTS)]
    close(found, torch.tensor([one.outputs.score for one in llm.score(QUERY, DOCUMENTS)]).double(), 5e-3)


def test_scores_of_async_llm(folder: Path, llm: LLM) -> None:
    async def run() -> list[float]:
        async with AsyncLLM(folder, progress=False) as other:
            embedding = asyncio.create_task(other.embed("a"))  # in the same steps
            found = await asyncio.gather(*(other.score(QUERY, text) for text in DOCUMENTS))
            assert len((await embedding).outputs.embedding) == 48
            return [one.outputs.score for one in found]

    wanted = torch.tensor([one.outputs.score for one in llm.score(QUERY, DOCUMENTS)])
    close(asyncio.run(run()), wanted.double(), 2e-6)


@pytest.mark.full
def test_sentence_transformers(folder: Path, llm: LLM) -> None:
    library: Any = pytest.importorskip("sentence_transformers")
    model = library.CrossEncoder(str(folder), device="cpu")
    want = torch.from_numpy(model.predict([(QUERY, text) for text in DOCUMENTS])).double()
    close([one.outputs.score for one in llm.score(QUERY, DOCUMENTS)], want)
