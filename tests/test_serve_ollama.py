"""Ollama's interface, by its own client where it is installed, over the answers of a forced model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

from support.scripted_llm import Say, sayer, scripted_llm
from support.serving import MODEL, ask, service_of, serving
from torch_infini import LLM, AsyncLLM, SamplingParams
from torch_infini.models import Llama, LlamaConfig
from torch_infini.serve import Service
from torch_infini.serve.ollama.description import weight_counts
from torch_infini.testing.checkpoints import random_model

pytestmark = pytest.mark.usefixtures("one_thread")
CHAT, GENERATE = "/api/chat", "/api/generate"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content or '' }}|"
    "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{{ m.tool_call_id }}{{ m.name }}]{% endfor %}A:"
    "{# <tool_call> </think> #}{{ '!' if enable_thinking is false }}{{ reasoning_effort }}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"x\\""}}\n</tool_call>'
WEATHER = {"index": 0, "name": "weather", "arguments": {"city": 'Zürich "x"'}}
USER = [{"role": "user", "content": "hello"}]
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    with scripted_llm(tmp_path_factory.mktemp("model"), TEMPLATE) as made:
        yield made


@pytest.fixture(scope="module")
def service(llm: AsyncLLM) -> Service:
    return service_of(llm)


@pytest.fixture
def say(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Say:
    return sayer(llm, monkeypatch)


def post(service: Service, path: str, **fields: Any) -> dict[str, Any]:
    answer = ask(service, "POST", path, json={"model": MODEL, "stream": False, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(service: Service, path: str, **fields: Any) -> dict[str, Any]:
    """Join the lines of a stream, the default, to the answer that is not streamed."""
    response = ask(service, "POST", path, json={"model": MODEL, **fields})
    assert response.headers["content-type"] == "application/x-ndjson"
    *lines, last = map(json.loads, response.text.splitlines())
    answer: dict[str, Any] = last
    target = answer["message"] if path == CHAT else answer
    text = "content" if path == CHAT else "response"
    assert last["done"] is True and target[text] == ""
    for line in lines:
        assert line["done"] is False and line["model"] == MODEL and TIME.fullmatch(line["created_at"])
        part = line["message"] if path == CHAT else line
        assert path != CHAT or part["role"] == "assistant"
        for name in {text, "thinking", "tool_calls"} & part.keys():
            target[name] = target[name] + part[name] if name in target else part[name]
    return answer


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what differs from one call to the next."""
    shown = {name: value for name, value in answer.items() if not re.search("_duration|created_at", name)}
    if calls := answer.get("message", {}).get("tool_calls"):
        assert len({call["id"] for call in calls}) == len(calls)
        shown["message"] = {**answer["message"], "tool_calls": [{"function": call["function"]} for call in calls]}
    return shown


def tokens_of(service: Service, text: str) -> int:
    return len(service.llm.engine.tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hello, Zürich.", {"content": "Hello, Zürich."}),
        (
            f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}",
            {"content": "Let me see.", "thinking": "Hm.", "tool_calls": [{"function": WEATHER}]},
        ),
        (
            f"{CALL}\n{CALL}",
            {"content": "", "tool_calls": [{"function": WEATHER}, {"function": {**WEATHER, "index": 1}}]},
        ),
        ("<tool_call>\nno call", {"content": "<tool_call>\nno call"}),
    ],
)
def test_chats(service: Service, say: Say, text: str, message: dict[str, Any]) -> None:
    say(text)
    answer = post(service, CHAT, messages=USER, tools=[TOOL])
    assert TIME.fullmatch(answer["created_at"])
    times = [answer[f"{name}_duration"] for name in ("total", "prompt_eval", "eval")]
    assert times[0] == times[1] + times[2] and min(times) > 0 and answer["load_duration"] == 0
    prompt = json.dumps([TOOL], ensure_ascii=False) + "[user:|hello]A:"
    assert plain(answer) == {
        "model": MODEL,
        "message": {"role": "assistant", **message},
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": tokens_of(service, prompt),
        "eval_count": tokens_of(service, text + "<eos>"),
    }
    assert plain(streamed(service, CHAT, messages=USER, tools=[TOOL])) == plain(answer)


def test_generated_text(service: Service, say: Say) -> None:
    say("<think>\nHm.\n</think>\n\nYes.")
    answer = post(service, GENERATE, prompt="a", system="s", think=False)
    assert answer["response"] == "Yes." and answer["thinking"] == "Hm." and answer["done_reason"] == "stop"
    assert answer["prompt_eval_count"] == tokens_of(service, "[system:|s][user:|a]A:!")
    assert plain(streamed(service, GENERATE, prompt="a", system="s", think=False)) == plain(answer)
    answer = post(service, GENERATE, prompt="[a", raw=True)
    assert answer["response"] == "<think>\nHm.\n</think>\n\nYes." and "thinking" not in answer
    assert answer["prompt_eval_count"] == tokens_of(service, "[a")
    assert plain(streamed(service, GENERATE, prompt="[a", raw=True)) == plain(answer)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_limits_and_stops(service: Service, say: Say, path: str) -> None:
    say("one two three")
    prompt: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "hello"}
    for options, text, reason in (
        ({"num_predict": 5}, "one t", "length"),
        ({"num_predict": -1, "stop": ["two"]}, "one ", "stop"),
        ({"num_predict": -2, "stop": "three", "num_ctx": 8, "mirostat": 0}, "one two ", "stop"),
        ({"num_predict": 10**9}, "one two three", "stop"),  # beyond the context: a limit, no demand
    ):
        for raw in ({}, {"raw": True}) if path == GENERATE else ({},):
            answer = post(service, path, **prompt, **raw, options=options)
            assert (answer["message"]["content"] if path == CHAT else answer["response"]) == text
            assert answer["done_reason"] == reason
            assert plain(streamed(service, path, **prompt, **raw, options=options)) == plain(answer)


def test_a_call_that_the_limit_cuts_is_left_out(service: Service, say: Say) -> None:
    say(CALL)
    fields: dict[str, Any] = {"messages": USER, "tools": [TOOL], "options": {"num_predict": 55}}
    answer = post(service, CHAT, **fields)
    assert answer["message"] == {"role": "assistant", "content": ""} and answer["done_reason"] == "length"
    assert plain(streamed(service, CHAT, **fields)) == plain(answer)


def test_options_reach_the_engine(service: Service, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    say("ok")
    seen: list[SamplingParams] = []
    make = service.llm.engine.new_request

    def spy(prompt: Any, params: SamplingParams, *more: Any) -> Any:
        seen.append(params)
        return make(prompt, params, *more)

    monkeypatch.setattr(service.llm.engine, "new_request", spy)
    options = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.125, "seed": 3, "repeat_penalty": 1.5}
    options |= {"presence_penalty": 0.25, "frequency_penalty": -0.5}
    post(service, CHAT, messages=USER, options={**options, "stop": ["x", "y"], "num_predict": 9, "num_thread": 4})
    post(service, GENERATE, prompt="a", raw=True, options=options, keep_alive="5m")
    post(service, CHAT, messages=USER, options={"seed": -1, "top_k": -1})
    assert seen[2].seed is None and seen[2].top_k == 0
    for params in seen[:2]:
        found = {name: getattr(params, name.replace("repeat", "repetition")) for name in options}
        assert found == options
    assert tuple(seen[0].stop) == ("x", "y") and [params.max_tokens for params in seen] == [9, None, None]


def test_the_conversation_reaches_the_template(service: Service, say: Say) -> None:
    say("ok")
    call = {"function": {"name": "a", "arguments": {"x": 1}}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u", "images": []},
        {
            "role": "assistant",
            "thinking": "why",
            "tool_calls": [call, {"function": {"name": "b"}}, {**call, "id": "i"}],
        },
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of a"},
        {"role": "tool", "content": "of i", "tool_call_id": "i"},
    ]
    answer = post(service, CHAT, messages=messages, think="high")

    def shown(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"function": {"arguments": arguments, "name": name}, "id": id, "type": "function"}

    calls = [shown("call_0", "a", {"x": 1}), shown("call_1", "b", {}), shown("i", "a", {"x": 1})]
    wanted = (
        f"[system:|s][user:|u][assistant:why|{json.dumps(calls)}][tool:|of bcall_1b][tool:|of acall_0][tool:|of ii]"
    )
    assert answer["prompt_eval_count"] == tokens_of(service, f"{wanted}A:high")


def test_formats(service: Service, say: Say) -> None:
    say('<think>\nHm.\n</think>\n\n{"city": "Rome"}')
    for format in ("json", CITY):
        answer = post(service, CHAT, messages=USER, format=format, think=True)
        assert json.loads(answer["message"]["content"]) == {"city": "Rome"} and answer["message"]["thinking"] == "Hm."
        assert plain(streamed(service, CHAT, messages=USER, format=format, think=True)) == plain(answer)
    say('{"city": "Rome"}')
    for raw in (False, True):
        assert json.loads(post(service, GENERATE, prompt="a", format=CITY, raw=raw)["response"]) == {"city": "Rome"}


def test_a_request_without_a_prompt_loads_the_model(service: Service) -> None:
    answer = post(service, CHAT, keep_alive=0)
    assert answer["message"] == {"role": "assistant", "content": ""} and answer["done_reason"] == "load"
    answer = post(service, GENERATE, prompt="")
    assert answer["response"] == "" and answer["done"] is True and answer["done_reason"] == "load"


def test_embeddings(service: Service) -> None:
    """The vectors of /v1/embeddings, in Ollama's forms."""
    texts = ["a text", "another one"]
    wanted = ask(service, "POST", "/v1/embeddings", json={"input": texts}).json()
    vectors = [item["embedding"] for item in wanted["data"]]
    answer = post(service, "/api/embed", **{"stream": None, "input": texts, "keep_alive": "5m"})
    assert answer["embeddings"] == vectors and answer["model"] == MODEL and answer["total_duration"] > 0
    assert answer["prompt_eval_count"] == wanted["usage"]["prompt_tokens"]
    assert post(service, "/api/embed", stream=None, input=texts[0])["embeddings"] == vectors[:1]
    assert post(service, "/api/embeddings", stream=None, prompt=texts[1]) == {"embedding": vectors[1]}
    assert post(service, "/api/embed", stream=None)["embeddings"] == []  # has the model loaded
    long = "x" * 5000  # beyond the context
    assert len(post(service, "/api/embed", stream=None, input=long)["embeddings"]) == 1
    for fields, rule in (
        ({"input": long, "truncate": False}, "must be at most 2048"),
        ({"input": [5]}, "input must be a text, or a list of at most"),
        ({"input": "a", "dimensions": 3}, "dimensions must be"),
        ({"input": "a", "options": {"nonsense": 1}}, "options.nonsense must be a field"),
    ):
        refused = ask(service, "POST", "/api/embed", json={"model": MODEL, **fields})
        assert refused.status_code == 400 and rule in refused.json()["error"], refused.text


def test_embeddings_by_the_official_client(service: Service) -> None:
    ollama = pytest.importorskip("ollama")
    with serving(service) as url:
        client = ollama.Client(url)
        assert len(client.embed(MODEL, ["a", "b"]).embeddings) == 2 and client.embeddings(MODEL, "a").embedding


def test_descriptions(service: Service, llm: AsyncLLM, say: Say) -> None:
    say("ok")
    assert tuple(map(int, ask(service, "GET", "/api/version").json()["version"].split("."))) >= (0, 6, 4)
    [entry] = ask(service, "GET", "/api/tags").json()["models"]
    model = llm.engine.model
    assert isinstance(model, Llama)
    count = sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in model.parameters()}.values())
    assert entry["name"] == entry["model"] == MODEL and TIME.fullmatch(entry["modified_at"])
    assert re.fullmatch("[0-9a-f]{64}", entry["digest"]) and entry["size"] >= 4 * count
    assert entry["details"]["family"] == "llama" and entry["details"]["quantization_level"] == "F32"
    [running] = ask(service, "GET", "/api/ps").json()["models"]
    assert running["name"] == MODEL and running["context_length"] == 2048 and running["size_vram"] == 0
    for name in ({"model": MODEL}, {"model": f"{MODEL}:latest"}, {"name": MODEL, "verbose": True}):
        found = ask(service, "POST", "/api/show", json=name).json()
        info = found["model_info"]
        assert info["general.architecture"] == "llama" and info["general.parameter_count"] == count
        assert info["llama.context_length"] == 2048 and info["llama.block_count"] == model.config.num_hidden_layers
        assert found["capabilities"] == ["completion", "tools", "thinking"] and found["template"] == TEMPLATE
    say("ok", "{{ messages[0].content }}")
    assert ask(service, "POST", "/api/show", json={"model": MODEL}).json()["capabilities"] == ["completion"]
    assert post(service, CHAT, messages=USER, model=f"{MODEL}:latest")["model"] == MODEL


def test_counts_of_quantized_weights() -> None:
    whole = random_model("llama")
    config = LlamaConfig.from_dict(whole.config.to_dict())
    counts = [weight_counts(Llama(config, weights)) for weights in ("dense", "int8")]
    assert counts[0].total() == counts[1].total() == sum(tensor.numel() for tensor in whole.parameters())
    assert set(counts[0]) == {"F32"} and 0 < counts[1]["F32"] < counts[1].total()
    for weights in (None, "int8"):
        llm = LLM(random_model("llama"), quantization=weights)
        found = weight_counts(llm.engine.model)
        assert found.total() == counts[0].total(), found
        assert (len(found) == 1) == (weights is None)


COMMON: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model must be"),
    ({"model": "other"}, "model must be small, got 'other'"),
    ({"stream": 1}, "stream must be"),
    ({"other": 1}, "other must be a field of this request, got an unknown one"),
    ({"think": "much"}, "think must be true, false, low, medium or high, got 'much'"),
    ({"format": "xml"}, "format must be \"json\" or a JSON schema, got 'xml'"),
    ({"format": {"type": "nothing"}}, "format must"),
    ({"format": json.loads('{"not":' * 65 + "{}" + "}" * 65)}, "format must"),
    ({"options": []}, "options must be"),
    ({"options": {"temperature": 3}}, "options.temperature must be less than or equal to 2, got 3"),
    ({"options": {"top_p": "1"}}, "options.top_p must be"),
    ({"options": {"top_k": -2}}, "options.top_k must be"),
    ({"options": {"repeat_penalty": 1e300}}, "options.repeat_penalty must be less than or equal to 3"),
    ({"options": {"num_predict": 0}}, "options.num_predict must be an integer of at least 1, or -1 or -2"),
    ({"options": {"stop": [""]}}, "options.stop must be a string or a list of strings"),
    ({"options": {"mirostat": 1}}, "options.mirostat must be null or 0 (more is not supported), got 1"),
    ({"options": {"tempreature": 1}}, "options.tempreature must be a field of this request, got an unknown one"),
    ({"logprobs": True}, "logprobs must be null or False (more is not supported), got True"),
]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": 1}, "messages must be"),
    ({"messages": [1]}, "messages[0] must be"),
    ({"messages": [{"role": "judge", "content": ""}]}, "messages[0].role must be"),
    ({"messages": [{"role": "user"}]}, "messages[0].content must be a text"),
    ({"messages": [{"role": "user", "content": "", "images": ["aGk="]}]}, "must have no images for this model"),
    ({"messages": [{"role": "user", "content": "", "thinking": "x"}]}, "messages[0].thinking must be null where role"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function must be given"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.arguments must be",
    ),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name must match"),
    ({"tools": [1]}, "tools[0] must be"),
]
GENERATIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 1}, "prompt must be"),
    ({"suffix": "x"}, "suffix must be null or '' (more is not supported), got 'x'"),
    ({"context": [1]}, "context must be null or [] (more is not supported), got [1]"),
    ({"template": "x"}, "template must be null or ''"),
    ({"images": ["aGk="]}, "must have no images for this model"),
    ({"raw": True, "system": "x"}, "system must be null where raw is true, got 'x'"),
]


@pytest.mark.parametrize(
    ("path", "fields", "rule"),
    [
        *((path, *one) for path in (CHAT, GENERATE) for one in COMMON),
        *((CHAT, *one) for one in CHATS),
        *((GENERATE, *one) for one in GENERATIONS),
        ("/api/show", {"model": None}, "model must be given, got none"),
        ("/api/show", {"model": "other"}, "model must be small, got 'other'"),
    ],
)
def test_bodies_that_are_refused(service: Service, path: str, fields: dict[str, Any], rule: str) -> None:
    body: dict[str, Any] = {CHAT: {"messages": USER}, GENERATE: {"prompt": "a"}}.get(path, {})
    answer = ask(service, "POST", path, json={"model": MODEL, **body, **fields})
    assert answer.status_code == (404 if fields.get("model") else 400), answer.text
    assert set(answer.json()) == {"error"} and rule in answer.json()["error"], answer.text


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_bodies_are_json_whatever_their_type(service: Service, say: Say, kind: str | None) -> None:
    """`curl -d` and LiteLLM name another type, or none; web pages, which have an origin, must name it."""
    say("ok")
    body = json.dumps({"model": MODEL, "messages": USER, "stream": False})
    headers = {} if kind is None else {"Content-Type": kind}
    answer = ask(service, "POST", CHAT, content=body, headers=headers)
    assert answer.status_code == 200 and answer.json()["message"]["content"] == "ok", answer.text
    answer = ask(service, "POST", CHAT, content=body, headers={**headers, "Origin": "https://elsewhere.example"})
    assert answer.status_code == 415 and "Content-Type must be" in answer.json()["error"]


def test_other_errors(llm: AsyncLLM, service: Service, say: Say) -> None:
    say("ok")
    for method, path, status in (("POST", "/api/pull", 404), ("GET", CHAT, 405)):
        answer = ask(service, method, path)
        assert answer.status_code == status and isinstance(answer.json()["error"], str)
    locked = service_of(llm, api_key="secret")
    for headers, status in (({"authorization": "Bearer secret"}, 200), ({}, 401)):
        answer = ask(locked, "GET", "/api/tags", headers=headers)
        assert answer.status_code == status
        assert status == 200 or "Authorization must be" in answer.json()["error"]


def test_an_error_in_a_stream_is_a_line(service: Service, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    say("one two three")

    def fail(generated: Any, logits: Any) -> Any:
        raise RuntimeError

    make = service.llm.engine.new_request

    def failing(prompt: Any, params: SamplingParams, *more: Any) -> Any:
        request = make(prompt, params, *more)
        object.__setattr__(request.params, "logits_processors", (fail,))
        return request

    monkeypatch.setattr(service.llm.engine, "new_request", failing)
    lines = ask(service, "POST", CHAT, json={"model": MODEL, "messages": USER}).text.splitlines()
    assert set(json.loads(lines[-1])) == {"error"} and isinstance(json.loads(lines[-1])["error"], str)


def test_the_official_client(service: Service, say: Say) -> None:
    ollama = pytest.importorskip("ollama")
    say(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}")

    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: Where.
        """
        return city

    with serving(service) as url:
        client = ollama.Client(url)
        [listed] = client.list().models
        assert listed.model == MODEL and listed.modified_at.year > 2000 and listed.details.family == "llama"
        assert client.show(MODEL).capabilities == ["completion", "tools", "thinking"]
        assert client.show(MODEL).modelinfo["llama.context_length"] == 2048
        assert client.ps().models[0].context_length == 2048
        answer = client.chat(MODEL, USER, tools=[weather], think=True)
        assert answer.message.thinking == "Hm." and answer.message.content == "Let me see."
        assert answer.message.tool_calls[0].function.arguments == WEATHER["arguments"]
        parts = list(client.chat(MODEL, USER, tools=[weather], stream=True))
        assert "".join(part.message.content for part in parts) == "Let me see."
        assert sum((list(part.message.tool_calls or []) for part in parts), []) == answer.message.tool_calls
        assert parts[-1].done_reason == "stop" and parts[-1].eval_count == answer.eval_count
        result = {"role": "tool", "tool_name": "weather", "content": "warm"}
        say("It is warm.")
        assert client.chat(MODEL, [*USER, answer.message, result]).message.content == "It is warm."
        assert client.generate(MODEL, "a", options={"num_predict": 5}).response == "It is"
        assert "".join(part.response for part in client.generate(MODEL, "a", stream=True)) == "It is warm."
        say('{"city": "Rome"}')
        assert json.loads(client.chat(MODEL, USER, format=CITY).message.content) == {"city": "Rome"}
        with pytest.raises(ollama.ResponseError, match="model must be small, got 'other'") as error:
            client.chat("other", USER)
        assert error.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="must have no images for this model"):
            client.chat(MODEL, [{**USER[0], "images": [b"hi"]}])
