"""The server of an encoder: its embeddings, many clients in one batch, and routes that it does not serve."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
pytest.importorskip("transformers")

import httpx2 as httpx

from support.encoders import save_encoder, save_modules
from support.serving import MODEL, ask, service_of, serving
from torch_infini import LLM, AsyncLLM
from torch_infini.serve import Service

pytestmark = pytest.mark.usefixtures("one_thread")
PATH = "/v1/embeddings"
TEXTS = ["hello world", "", "a longer text of some more tokens than the others have", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_encoder(tmp_path_factory.mktemp("model"), matryoshka_dimensions=[8, 16])
    save_modules(folder, {"pooling_mode_mean_tokens": True}, "Normalize", sentence_bert_config={"max_seq_length": 100})
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(folder, max_num_seqs=4, progress=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def service(llm: AsyncLLM) -> Service:
    return service_of(llm, max_queue=100)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[float]]:
    return [output.outputs.embedding for output in LLM(folder, progress=False).embed(TEXTS)]


def is_near(found: list[list[float]], wanted: list[list[float]]) -> bool:
    pairs = [pair for one, other in zip(found, wanted, strict=True) for pair in zip(one, other, strict=True)]
    return max(abs(a - b) for a, b in pairs) < 2e-6


def test_embeddings(service: Service, wanted: list[list[float]]) -> None:
    answer = ask(service, "POST", PATH, json={"input": TEXTS}).json()
    assert is_near([one["embedding"] for one in answer["data"]], wanted)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3] and answer["model"] == MODEL
    assert answer["usage"]["prompt_tokens"] == sum(len(service.llm.engine.prompts.encode(text)) for text in TEXTS)
    many = ask(service, "POST", PATH, json={"input": TEXTS * 9}).json()
    assert is_near([one["embedding"] for one in many["data"]], wanted * 9)
    coded = ask(service, "POST", PATH, json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    data = base64.b64decode(coded["data"][0]["embedding"])
    assert is_near([list(struct.unpack(f"<{len(data) // 4}f", data))], wanted[:1])
    short = ask(service, "POST", PATH, json={"input": TEXTS[0], "dimensions": 8}).json()["data"][0]["embedding"]
    assert len(short) == 8 and abs(sum(x * x for x in short) - 1) < 1e-5
    pooled = ask(service, "POST", "/pooling", json={"input": TEXTS, "pooling": "max", "normalize": False}).json()
    assert [len(one["data"]) for one in pooled["data"]] == [48] * 4
    assert service.in_flight == 0 and service.llm.engine.is_idle


def test_prompt_name(tmp_path: Path) -> None:
    """Texts begin with the folder's prompt of that name."""
    folder = save_encoder(tmp_path)
    prompts = {"prompts": {"query": "ask: ", "passage": ""}}
    save_modules(folder, {"pooling_mode_mean_tokens": True}, config_sentence_transformers=prompts)
    wanted = LLM(folder, progress=False).embed(["ask: a", "a"])
    llm = AsyncLLM(folder, max_num_seqs=4, progress=False)
    service = service_of(llm, max_queue=100)

    def send(**fields: Any) -> Any:
        return ask(service, "POST", PATH, json={"input": "a", **fields}).json()

    found: list[tuple[dict[str, Any], Any]] = [({"prompt_name": "query"}, wanted[0]), ({}, wanted[1])]
    for fields, output in [*found, ({"prompt_name": "passage"}, wanted[1])]:
        answer = send(**fields)
        assert "data" in answer, answer
        assert is_near([answer["data"][0]["embedding"]], [output.outputs.embedding])
    bad: list[tuple[dict[str, Any], str]] = [
        ({"prompt_name": "other"}, "prompt_name must be 'query', 'passage', got 'other'"),
        ({"prompt_name": "query", "input": [5, 6]}, "prompt_name must be left out for token ids, got 'query'"),
        ({"prompt_name": 5}, "prompt_name must be"),
    ]
    for fields, rule in bad:
        error = send(**fields)["error"]
        assert error["message"].startswith(rule) and error["param"] == "prompt_name", error
    assert service.in_flight == 0
    llm.close()


def test_lengths(service: Service) -> None:
    full = ask(service, "POST", PATH, json={"input": [[5] * 100]})
    assert full.status_code == 200 and full.json()["usage"]["prompt_tokens"] == 100
    for given in ([5] * 101, "a" * 99):
        error = ask(service, "POST", PATH, json={"input": given}).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == "input"
        assert error["message"] == "the text's tokens must be at most 100, the context's length, got 101"
    answer = ask(service, "POST", PATH, json={"input": "a" * 999, "truncate_prompt_tokens": -1}).json()
    assert answer["usage"]["prompt_tokens"] == 100


def test_routes_that_generate(service: Service) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "model": MODEL}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {**chat, "max_tokens": 5}),
        ("/api/generate", {"model": MODEL, "prompt": "a"}),
        ("/api/chat", chat),
    ):
        answer = ask(service, "POST", path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert "model must be a causal language model for this route, got an encoder" in answer.text, (
            path,
            answer.text,
        )
    error = ask(service, "POST", "/v1/chat/completions", json=chat).json()["error"]
    assert (error["param"], error["code"]) == ("model", "unsupported_task")
    assert service.in_flight == 0


def test_other_routes(service: Service) -> None:
    assert ask(service, "GET", "/v1/models").json()["data"][0]["max_model_len"] == 100
    assert ask(service, "GET", "/health").status_code == 200
    assert ask(service, "POST", "/tokenize", json={"prompt": "ab"}).json()["count"] == 4
    assert ask(service, "POST", "/api/show", json={"model": MODEL}).json()["capabilities"] == ["embedding"]
    assert ask(service, "GET", "/props").status_code == 200 and ask(service, "GET", "/slots").status_code == 200
    text = ask(service, "GET", "/metrics").text
    assert "infini:request_prompt_tokens_count" in text and "infini:kv_cache_usage_perc" in text


def test_texts_of_many_clients_share_steps(service: Service, wanted: list[list[float]]) -> None:
    steps = service.llm.metrics().steps

    def send(i: int) -> list[float]:
        answer = httpx.post(f"{url}{PATH}", json={"input": TEXTS[i % 4]}, timeout=60)
        vector: list[float] = answer.json()["data"][0]["embedding"]
        return vector

    with serving(service) as url, ThreadPoolExecutor(32) as threads:
        assert is_near(list(threads.map(send, range(64))), wanted * 16)
    assert service.llm.metrics().steps - steps < 64


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = save_encoder(tmp_path_factory.mktemp("ranker"), "bert", "ForSequenceClassification", num_labels=1)
    with_head = AsyncLLM(folder, max_num_seqs=4, progress=False)
    yield service_of(with_head, max_queue=100)
    with_head.close()


@pytest.fixture(scope="module")
def scores(ranker: Service) -> list[float]:
    """Of another engine with the same model."""
    folder = ranker.llm.engine.model.model.name_or_path  # type: ignore[attr-defined]
    return [one.outputs.score for one in LLM(folder, progress=False).score("how tall", TEXTS)]


def test_scores(ranker: Service, scores: list[float]) -> None:
    bodies = ({"text_1": "how tall", "text_2": TEXTS}, {"queries": ["how tall"] * 4, "documents": TEXTS, "user": "me"})
    for path in ("/score", "/v1/score"):
        for body in bodies:
            answer = ask(ranker, "POST", path, json=body).json()
            assert is_near([[one["score"] for one in answer["data"]]], [scores])
            assert [(one["index"], one["object"]) for one in answer["data"]] == [(i, "score") for i in range(4)]
            assert answer["id"].startswith("score-") and answer["object"] == "list" and answer["model"] == MODEL
    tokens = sum(len(ranker.llm.engine.prompts.encode("how tall")) + len(text.encode()) + 1 for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    plain = ask(ranker, "POST", "/score", json={"text_1": "a", "text_2": "b", "use_activation": False}).json()
    sigmoid = ask(ranker, "POST", "/score", json={"text_1": "a", "text_2": "b"}).json()["data"][0]["score"]
    assert abs(1 / (1 + math.exp(-plain["data"][0]["score"])) - sigmoid) < 1e-6
    assert ranker.in_flight == 0


def test_rerank(ranker: Service, scores: list[float]) -> None:
    order = sorted(range(4), key=lambda i: -scores[i])
    body: dict[str, Any] = {"query": "how tall", "documents": TEXTS}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = ask(ranker, "POST", path, json=body).json()
        assert [one["index"] for one in answer["results"]] == order and answer["id"].startswith("rerank-")
        assert is_near([[one["relevance_score"] for one in answer["results"]]], [[scores[i] for i in order]])
        assert [one["document"]["text"] for one in answer["results"]] == [TEXTS[i] for i in order]
    objects = {"query": "how tall", "documents": [{"text": text} for text in TEXTS], "top_n": 2}
    answer = ask(ranker, "POST", "/rerank", json={**objects, "return_documents": False}).json()
    assert [set(one) for one in answer["results"]] == [{"index", "relevance_score"}] * 2
    many = ask(ranker, "POST", "/rerank", json={"query": "a", "documents": TEXTS * 9, "top_n": 0}).json()
    assert sorted(one["index"] for one in many["results"]) == list(range(36))
    cut = {"query": "a", "documents": ["b" * 999], "truncate_prompt_tokens": -1}
    assert ask(ranker, "POST", "/rerank", json=cut).json()["usage"]["total_tokens"] == 130


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    names = {0: "sad", 1: "glad", 2: "mad"}
    folder = save_encoder(
        tmp_path_factory.mktemp("classifier"), "bert", "ForSequenceClassification", num_labels=3, id2label=names
    )
    with_head = AsyncLLM(folder, max_num_seqs=4, progress=False)
    yield service_of(with_head, max_queue=100)
    with_head.close()


def test_classify(classifier: Service) -> None:
    """Of texts and of token ids, in the form of vLLM's server."""
    engine = classifier.llm.engine
    folder = engine.model.model.name_or_path  # type: ignore[attr-defined]
    wanted = [one.outputs.probs for one in LLM(folder, progress=False).classify(TEXTS)]
    ids = [engine.prompts.encode(text) for text in TEXTS]
    for path, given in (("/classify", TEXTS), ("/v1/classify", ids)):
        answer = ask(classifier, "POST", path, json={"input": given, "user": "me"}).json()
        assert is_near([one["probs"] for one in answer["data"]], wanted)
        assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3] and answer["id"].startswith("classify-")
        for one in answer["data"]:
            assert one["label"] == ("sad", "glad", "mad")[one["probs"].index(max(one["probs"]))]
            assert one["num_classes"] == 3 and abs(sum(one["probs"]) - 1) < 1e-6
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids)) and answer["model"] == MODEL
    logits = ask(classifier, "POST", "/classify", json={"input": "a", "use_activation": False}).json()["data"][0]
    assert is_near([torch.tensor(logits["probs"]).softmax(0).tolist()], wanted[3:])
    assert classifier.in_flight == 0 and engine.is_idle


def test_bad_bodies_of_classify(classifier: Service, service: Service) -> None:
    for body, param in (
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": "a" * 200}, "input"),
        ({"input": "a", "use_activation": 1}, "use_activation"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "stream": True}, "stream"),
    ):
        answer = ask(classifier, "POST", "/classify", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (body, answer.text)
    error = ask(service, "POST", "/classify", json={"input": "a"}).json()["error"]
    assert error["message"].startswith("model must be a classifier (...ForSequenceClassification), got a model without")
    assert error["param"] == "model" and classifier.in_flight == 0


def test_one_label(ranker: Service) -> None:
    """A cross-encoder classifies too, by the probability of its only label."""
    found = ask(ranker, "POST", "/classify", json={"input": "how tall"}).json()["data"][0]
    assert found["num_classes"] == 1 and found["label"] == "LABEL_0" and 0 < found["probs"][0] < 1


def test_bad_bodies_of_scores(ranker: Service) -> None:
    pair: dict[str, Any] = {"text_1": "a", "text_2": "b"}
    rank: dict[str, Any] = {"query": "a", "documents": ["b"]}
    for path, body, param in (
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"queries": "a"}, "documents"),
        ("/score", {"documents": ["a"]}, "queries"),
        ("/score", {**pair, "queries": "a", "documents": "b"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": [], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": 5, "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": [[5]]}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "\ud800"}, "text_2"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
        ("/score", {**pair, "use_activation": 1}, "use_activation"),
        ("/score", {**pair, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/score", {**pair, "stream": True}, "stream"),
        ("/score", {"text_1": "a", "text_2": "b" * 200}, "text_2"),
        ("/rerank", {}, "query"),
        ("/rerank", {**rank, "query": ["a"]}, "query"),
        ("/rerank", {**rank, "documents": "b"}, "documents"),
        ("/rerank", {**rank, "documents": []}, "documents"),
        ("/rerank", {**rank, "documents": [{"title": "b"}]}, "documents"),
        ("/rerank", {**rank, "documents": ["b" * 200]}, "documents"),
        ("/rerank", {**rank, "top_n": -1}, "top_n"),
        ("/rerank", {**rank, "top_n": True}, "top_n"),
        ("/rerank", {**rank, "return_documents": "no"}, "return_documents"),
    ):
        answer = ask(ranker, "POST", path, content=json.dumps(body), headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), (body, error)
        assert error["message"].startswith(param) or error["code"] == "context_length_exceeded", error
    assert ask(ranker, "POST", "/score", json={**pair, "model": "other"}).status_code == 404
    assert ranker.in_flight == 0 and ranker.llm.engine.is_idle


def test_scores_of_other_models(service: Service) -> None:
    for path, body in (("/score", {"text_1": "a", "text_2": "b"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        answer = ask(service, "POST", path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model")
        assert error["message"].startswith("model must be a cross-encoder, a classifier with one label")
