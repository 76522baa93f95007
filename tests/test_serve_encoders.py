"""The server of an encoder: its embeddings, many clients in one batch, and routes that it does not serve."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

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
    assert answer["usage"]["prompt_tokens"] == sum(len(service.llm.engine.encode(text)) for text in TEXTS)
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
