"""/v1/embeddings and /pooling: the official client, every form of the input, bad bodies, and clients that leave."""

from __future__ import annotations

import base64
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

from support.serving import MODEL, ask, save_model, send_raw, service_of, serving, wait_until
from torch_infini import LLM, AsyncLLM
from torch_infini.serve import Service

pytest_plugins = ["support.serving_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")
PATH = "/v1/embeddings"
TEXTS = ["hello world", "naïve café ☕", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16]}))
    return folder


@pytest.fixture(scope="module")
def service(llm: AsyncLLM) -> Service:
    return service_of(llm, max_queue=2)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[float]]:
    return [output.outputs.embedding for output in LLM(folder, progress=False).embed(TEXTS)]


def is_idle(service: Service) -> bool:
    metrics = service.llm.metrics()
    return service.in_flight == 0 and service.llm.engine.is_idle and metrics.free_blocks == metrics.blocks


def test_the_official_client(service: Service, wanted: list[list[float]]) -> None:
    """It asks for base64 unless told otherwise."""
    openai = pytest.importorskip("openai")
    with serving(service) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model=MODEL, input=TEXTS)
        assert [one.embedding for one in answer.data] == wanted and [one.index for one in answer.data] == [0, 1, 2]
        tokens = sum(len(service.llm.engine.prompts.encode(text)) for text in TEXTS)
        assert answer.model == MODEL and answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
        plain = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
        assert plain.data[0].embedding == wanted[0]
        short = client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=8).data[0].embedding
        assert len(short) == 8 and abs(sum(x * x for x in short) - 1) < 1e-5
        size = sum(x * x for x in wanted[0][:8]) ** 0.5
        assert max(abs(a - b / size) for a, b in zip(short, wanted[0], strict=False)) < 1e-5
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=9)
        assert caught.value.param == "dimensions" and "8, 16" in str(caught.value)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="other", input="a")


def test_forms_of_the_input(service: Service, wanted: list[list[float]]) -> None:
    ids = [service.llm.engine.prompts.encode(text) for text in TEXTS]
    for given, want in ((TEXTS[0], wanted[:1]), (TEXTS, wanted), (ids[0], wanted[:1]), (ids, wanted)):
        answer = ask(service, "POST", PATH, json={"input": given, "user": "me"}).json()
        assert [one["embedding"] for one in answer["data"]] == want
        assert answer["object"] == "list" and {one["object"] for one in answer["data"]} == {"embedding"}
    answer = ask(service, "POST", PATH, json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    data = base64.b64decode(answer["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == wanted[0]
    assert is_idle(service)


def test_texts_that_are_cut(service: Service, wanted: list[list[float]]) -> None:
    for given in ("a" + "b" * 600, [service.llm.engine.prompts.encode("a")[0]] + [7] * 600):
        answer = ask(service, "POST", PATH, json={"input": given, "truncate_prompt_tokens": 1}).json()
        assert answer["data"][0]["embedding"] == wanted[2] and answer["usage"]["prompt_tokens"] == 1
        answer = ask(service, "POST", PATH, json={"input": given, "truncate_prompt_tokens": -1}).json()
        assert answer["usage"]["prompt_tokens"] == service.max_model_len - 1


def test_more_inputs_than_a_step_takes(service: Service, wanted: list[list[float]]) -> None:
    answer = ask(service, "POST", PATH, json={"input": TEXTS * 7}).json()
    assert [one["embedding"] for one in answer["data"]] == wanted * 7
    assert [one["index"] for one in answer["data"]] == list(range(21)) and is_idle(service)


def test_pooling(service: Service, folder: Path) -> None:
    other = LLM(folder, progress=False)
    for pooling in ("last", "mean", "cls", "max", "mean_sqrt_len"):
        for normalize in (True, False):
            body = {"input": TEXTS, "pooling": pooling, "normalize": normalize}
            answer = ask(service, "POST", "/pooling", json=body).json()
            want = other.embed(TEXTS, pooling=pooling, normalize=normalize)  # type: ignore[arg-type]
            assert [one["data"] for one in answer["data"]] == [one.outputs.embedding for one in want]
            assert answer["id"].startswith("pool-") and answer["data"][0]["object"] == "pooling"


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": ""}, "input"),
    ({"input": ["a", ""]}, "input"),
    ({"input": [[]]}, "input"),
    ({"input": [1, "a"]}, "input"),
    ({"input": [True]}, "input"),
    ({"input": 5}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": [320]}, "input"),
    ({"input": [10**30]}, "input"),
    ({"input": [5] * 512}, "input"),
    ({"input": "a" * 600}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": "\ud800"}, "input"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "encoding_format": 5}, "encoding_format"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": -8}, "dimensions"),
    ({"input": "a", "dimensions": 9}, "dimensions"),
    ({"input": "a", "dimensions": True}, "dimensions"),
    ({"input": "a", "dimensions": 8.0}, "dimensions"),
    ({"input": "a", "dimensions": 10**30}, "dimensions"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": "5"}, "truncate_prompt_tokens"),
    ({"input": "a", "stream": True}, "stream"),
    ({"input": "a", "temperature": 1}, "temperature"),
    ({"input": "a", "model": 5}, "model"),
]


@pytest.mark.parametrize("path", [PATH, "/pooling"])
def test_bad_bodies(path: str, service: Service) -> None:
    more = [({"input": "a", "pooling": "sum"}, "pooling"), ({"input": "a", "normalize": 1}, "normalize")]
    only_pooling = [({"input": "a", "pooling": "mean"}, "pooling"), ({"input": "a", "normalize": True}, "normalize")]
    for body, param in BAD + (more if path == "/pooling" else only_pooling):
        answer = ask(service, "POST", path, content=json.dumps(body), headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), (body, error)
        assert error["message"].startswith(param) or error["code"] == "context_length_exceeded", error
    for body in ("[]", "5", "null", "{", '{"input": "a"'):
        answer = ask(service, "POST", path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    assert ask(service, "GET", path).status_code == 405 and is_idle(service)


def test_a_full_queue_and_draining(llm: AsyncLLM) -> None:
    service = service_of(llm, max_queue=0)
    service.in_flight = service.capacity
    answer = ask(service, "POST", PATH, json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    service.in_flight = 0
    service.drain()
    assert ask(service, "POST", PATH, json={"input": "a"}).status_code == 503


def test_faults(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("/secret")

    with monkeypatch.context() as patched:
        patched.setattr(service.llm.engine._runner, "run", fail)
        answer = ask(service, "POST", PATH, json={"input": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
        assert "secret" not in answer.text
    assert ask(service, "POST", PATH, json={"input": "a"}).status_code == 200 and is_idle(service)


def test_a_client_that_leaves(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(llm)
    run = llm.engine._runner.run
    monkeypatch.setattr(llm.engine._runner, "run", lambda *given: (time.sleep(0.05), run(*given))[1])
    with serving(service) as url:
        connection = send_raw(url, PATH, {"input": [[5] * 400] * 200})
        wait_until(lambda: service.in_flight == 4)
        connection.close()
        wait_until(lambda: is_idle(service), 5)


def test_beside_completions(service: Service, wanted: list[list[float]]) -> None:
    """The counts of /metrics and the log's figures have them too."""
    before = dict(service.llm.metrics().requests)
    ask(service, "POST", PATH, json={"input": TEXTS})
    assert service.llm.metrics().requests["stop"] == before["stop"] + 3
    text = ask(service, "GET", "/metrics").text
    assert "infini:request_prompt_tokens_count" in text
