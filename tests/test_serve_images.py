"""Images in the bodies of the server's interfaces: one prompt, whatever the form; refused ones get status 400."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

from support.image_models import QWEN2_5_VL
from support.request_fuzzer import IMAGES, Fuzzer, fault_of
from support.serving import MODEL, ask, events_of, save_model, service_of
from test_image_models import greedy, image, png, url
from torch_infini import LLM, AsyncLLM
from torch_infini.patch.paged.images import PromptEmbedder
from torch_infini.patch.paged.sites import Unserved
from torch_infini.serve import Service

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

SEEN, TEXT = image(0), "what?"
FILE = base64.b64encode(png(SEEN)).decode()
PART = {"type": "image_url", "image_url": {"url": url(SEEN), "detail": "low"}}
QUESTION = {"type": "text", "text": TEXT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    QWEN2_5_VL.save(path)
    return path


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    torch.set_num_threads(1)
    llm = AsyncLLM(folder, max_num_seqs=4)
    yield service_of(llm)
    llm.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    [output] = LLM(folder).chat([{"role": "user", "content": [PART, QUESTION]}], greedy())
    return str(output.outputs[0].text)


def post(service: Service, path: str, **body: Any) -> Any:
    answer = ask(service, "POST", path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return answer


def chat(content: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": 8}
    return {"messages": [{"role": role, "content": content}], **sampling, **more}


def test_chat_completions(service: Service, expected: str) -> None:
    answer = post(service, "/v1/chat/completions", **chat([PART, QUESTION])).json()
    assert answer["choices"][0]["message"]["content"] == expected
    assert answer["usage"]["prompt_tokens"] > 20
    events = events_of(post(service, "/v1/chat/completions", **chat([PART, QUESTION], stream=True)).text)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"]) == expected
    tokens = post(service, "/tokenize", messages=chat([PART, QUESTION])["messages"]).json()
    assert tokens["count"] == answer["usage"]["prompt_tokens"]


def test_messages(service: Service, expected: str) -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": FILE}}
    body = {"messages": [{"role": "user", "content": [block, QUESTION]}], "temperature": 0, "max_tokens": 8}
    answer = post(service, "/v1/messages", **body).json()
    assert expected.startswith(answer["content"][0]["text"])


def test_responses(service: Service, expected: str) -> None:
    parts = [{"type": "input_image", "image_url": url(SEEN), "detail": "auto"}, {"type": "input_text", "text": TEXT}]
    sampling = {"temperature": 0, "max_output_tokens": 8, "ignore_eos": True}
    first = post(service, "/v1/responses", input=[{"role": "user", "content": parts}], **sampling).json()
    assert first["output"][0]["content"][0]["text"] == expected
    more = post(service, "/v1/responses", input="and?", previous_response_id=first["id"], **sampling).json()
    assert more["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_ollama(service: Service, expected: str) -> None:
    options = {"temperature": 0, "num_predict": 8}
    message = {"role": "user", "content": TEXT, "images": [FILE]}
    answer = post(service, "/api/chat", messages=[message], options=options, stream=False).json()
    assert expected.startswith(answer["message"]["content"])
    answer = post(service, "/api/generate", prompt=TEXT, images=[FILE], options=options, stream=False).json()
    assert expected.startswith(answer["response"])
    assert "vision" in post(service, "/api/show").json()["capabilities"]
    assert ask(service, "GET", "/props").json()["modalities"]["vision"] is True


def test_refused(service: Service, tmp_path: Path) -> None:
    """Status 400, the field and the rule; nothing is fetched."""
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    cases: tuple[tuple[str, dict[str, Any], str, str], ...] = (
        ("/v1/chat/completions", chat([bad]), "messages", "image 0 must be a file of PNG"),
        (
            "/v1/chat/completions",
            chat([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}]),
            "messages[0].content",
            "because this server fetches none",
        ),
        ("/v1/chat/completions", chat([{"type": "image_url"}]), "messages[0].content", "must have images as"),
        ("/v1/chat/completions", chat([{"type": "input_audio"}]), "messages[0].content", "type text and image_url"),
        ("/v1/chat/completions", chat([PART], role="system"), "messages[0].content", "only where role is user"),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}],
                "max_tokens": 1,
            },
            "messages[0].content[0].source.type",
            "fetches none",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}]},
            "input[0].content[0].image_url",
            "must be a text",
        ),
        (
            "/api/chat",
            {"messages": [{"role": "assistant", "images": [FILE]}]},
            "messages[0].images",
            "must be null where role is not user",
        ),
        ("/api/generate", {"prompt": "a", "raw": True, "images": [FILE]}, "images", "must be null where raw is true"),
    )
    for path, body, field, rule in cases:
        answer = ask(service, "POST", path, json={"model": MODEL, **body})
        assert answer.status_code == 400, answer.text
        assert rule in answer.text, answer.text
        if path.startswith("/v1/chat"):
            assert answer.json()["error"]["param"] == field
    text = save_model(tmp_path)
    with_text = AsyncLLM(text)
    answer = ask(service_of(with_text), "POST", "/v1/chat/completions", json={"model": MODEL, **chat([PART])})
    assert answer.status_code == 400 and "must have no images for this model (Llama reads text alone)" in answer.text
    with_text.close()


def test_what_the_model_finds_late(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that are refused once they are encoded are the client's error too, and other requests go on."""

    def refuse(*args: Any) -> None:
        raise Unserved("its text part is another")

    with monkeypatch.context() as patch:
        patch.setattr(PromptEmbedder, "_terms", refuse)
        for stream in (False, True):
            body = {"model": MODEL, **chat([PART], stream=stream)}
            answer = ask(service, "POST", "/v1/chat/completions", json=body)
            assert "its text part is another" in answer.text
            assert stream or answer.status_code == 400
    assert post(service, "/v1/chat/completions", **chat([PART])).json()["choices"]


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.full)])
def test_random_requests(count: int, service: Service) -> None:
    """Valid bodies with images and changes of them: no status 500, and nothing that is left behind."""
    for path, body in IMAGES:
        answer = ask(service, "POST", path, json=body)
        assert answer.status_code == 200, (path, answer.text)
    fuzzer = Fuzzer(count, ask(service, "GET", "/openapi.json").json(), IMAGES)
    statuses: Counter[int] = Counter()
    for _ in range(count):
        sent = fuzzer.request()
        headers = {} if sent.content_type is None else {"content-type": sent.content_type}
        answer = ask(service, sent.method, sent.path, content=sent.content, headers=headers)
        statuses[answer.status_code] += 1
        fault = fault_of(sent, answer.status_code, answer.headers.get("content-type", ""), answer.text)
        assert fault is None, (fault, sent, answer.text[:500])
    assert statuses[200] > 0.1 * count < statuses[400], statuses
    assert service.in_flight == 0 and service.llm.engine.is_idle
