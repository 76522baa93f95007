"""bench --server: its figures of scripted servers and of ours, and what it says of servers that fail."""

from __future__ import annotations

import csv
import json
import math
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("aiohttp")

from torch_infini.__main__ import main
from torch_infini.commands.load.client import Events, Failed, interface_of
from torch_infini.commands.load.plot import figure, ticks
from torch_infini.commands.load.prompts import random_prompts, read_prompts
from torch_infini.commands.load.report import text_of
from torch_infini.commands.load.results import Failure, Objective, Result, Summary, objective_of, percentile
from torch_infini.commands.load.schedule import arrivals

Answer = Callable[["Handler", dict[str, Any]], None]
MODELS = {"data": [{"id": "scripted"}, {"id": "other"}]}


class Handler(BaseHTTPRequestHandler):
    """Answers as the server's `answer` does; GET /v1/models lists `models`."""

    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(self.server.models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        self.server.answer(self, body)

    def reply(self, body: Any, status: int = 200) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def begin(self) -> None:
        """Begin a stream, which ends when the connection is closed."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def event(self, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.wfile.write(b"data: " + data + b"\n\n")
        self.wfile.flush()

    def chunk(self, text: str, finish: str | None = None) -> None:
        self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})

    def end(self, tokens: int = 4) -> None:
        self.event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": tokens}})
        self.event(b"[DONE]")


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Answer, models: Any = MODELS) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.models = answer, models
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def scripted(answer: Answer, models: Any = MODELS) -> Iterator[ScriptedServer]:
    with ScriptedServer(answer, models) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def timed(handler: Handler, body: dict[str, Any]) -> None:
    """30 ms, then a chunk each 20 ms, the second of which has two tokens."""
    handler.begin()
    time.sleep(0.03)
    for text in ("a", "bc", "d"):
        handler.chunk(text)
        time.sleep(0.02)
    handler.chunk("", "length")
    handler.end(4)


def run(capsys: pytest.CaptureFixture[str], url: str, *more: object) -> tuple[int, str, str]:
    status = main(["bench", "--server", url, *map(str, more)])
    return status, *capsys.readouterr()


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_figures_of_a_server_with_known_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table, plot = tmp_path / "a.csv", tmp_path / "a.svg"
    with scripted(timed) as server:
        more = ["--requests", 6, "--concurrency", 2, "--input-len", 5, "--output-len", 4, "--seed", 3, "--csv", table]
        status, out, _ = run(capsys, server.url, *more, "--plot", plot, "--objective", "ttft=10s,itl=1us,e2e=60s")
        assert status == 0
        seen = server.seen
    rows = rows_of(table)
    assert [row["request"] for row in rows] == [str(i) for i in range(6)]
    for row in rows:
        # What is read late, because this machine is busy, moves time from the gaps to the first token.
        assert 30 <= float(row["ttft_ms"]) < 1000
        assert 70 <= float(row["ttft_ms"]) + 2 * float(row["itl_mean_ms"]) < 1000
        assert float(row["tpot_ms"]) == pytest.approx(2 / 3 * float(row["itl_mean_ms"]), rel=1e-2)  # 2 gaps, 4 tokens
        assert float(row["e2e_ms"]) >= 90 > 0
        assert (row["input_tokens"], row["output_tokens"], row["finish_reason"]) == ("7", "4", "length")
        assert (row["meets_objective"], row["error"]) == ("0", "")
    # Two at a time: each third begins when a first has ended.
    starts = sorted(float(row["start_s"]) for row in rows)
    assert starts[1] < 0.09 <= starts[2] and starts[4] >= 0.18
    assert "requests   6 of 6 succeeded in " in out and "tokens     42 input, 24 output" in out
    assert "goodput    0 of 6 requests (0.0%) meet ttft <= 10000 ms, itl <= 0.001 ms, e2e <= 60000 ms: 0/s" in out
    assert out.startswith(f"scripted at {server.url}/v1/completions: 5 random words, ")
    for path, _, body in seen:
        assert path == "/v1/completions"
        assert len(body.pop("prompt").split()) == 5
        assert body == {
            "model": "scripted",
            "max_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "ignore_eos": True,
        }
    drawn = ElementTree.fromstring(plot.read_text())
    assert len(drawn.findall(".//{*}polyline")) == 3 and "time to first token" in plot.read_text()


def test_arrivals_are_those_of_a_poisson_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    times = arrivals(20_000, 50.0, 1)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert times[0] == 0 and times == arrivals(20_000, 50.0, 1) != arrivals(20_000, 50.0, 2)
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.05)

    def quick(handler: Handler, body: dict[str, Any]) -> None:
        handler.begin()
        handler.chunk("x", "stop")
        handler.end(1)

    table = tmp_path / "a.csv"
    with scripted(quick) as server:
        assert run(capsys, server.url, "--rate", 100, "--requests", 20, "--csv", table)[0] == 0
    for row, want in zip(rows_of(table), arrivals(20, 100.0, 0), strict=True):
        assert float(row["start_s"]) >= want - 1e-3  # sent when it arrives, or late where this machine is busy
        assert float(row["start_s"]) - want == pytest.approx(float(row["late_ms"]) / 1e3, abs=1e-3)
        assert (row["itl_mean_ms"], row["tpot_ms"]) == ("", "")  # of one token


def status_503(handler: Handler, body: dict[str, Any]) -> None:
    handler.reply({"error": {"message": "the server is\n shutting down", "code": "draining"}}, 503)


def status_500(handler: Handler, body: dict[str, Any]) -> None:
    handler.reply(b"<html>\xff" + b"x" * 5000, 500)


def cut(handler: Handler, body: dict[str, Any]) -> None:
    handler.begin()
    handler.chunk("one")


def short(handler: Handler, body: dict[str, Any]) -> None:
    """A body that is announced and breaks off."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.chunk("one")
    handler.close_connection = True


def silent(handler: Handler, body: dict[str, Any]) -> None:
    handler.close_connection = True


def error_event(handler: Handler, body: dict[str, Any]) -> None:
    handler.begin()
    handler.chunk("one")
    handler.event({"error": {"message": "the engine could not compute the request"}})
    handler.event(b"[DONE]")


def no_json(handler: Handler, body: dict[str, Any]) -> None:
    handler.begin()
    handler.event(b"{'a'")


def odd_choices(handler: Handler, body: dict[str, Any]) -> None:
    handler.begin()
    handler.event({"choices": ["text"]})


def whole(handler: Handler, body: dict[str, Any]) -> None:
    handler.reply({"choices": [{"text": "whole"}]})


def empty(handler: Handler, body: dict[str, Any]) -> None:
    handler.begin()
    handler.chunk("", "stop")
    handler.end(0)


def slow(handler: Handler, body: dict[str, Any]) -> None:
    handler.begin()
    handler.chunk("one")
    time.sleep(1.5)


def endless_line(handler: Handler, body: dict[str, Any]) -> None:
    handler.begin()
    try:
        for _ in range(20):
            handler.wfile.write(b"x" * (1 << 20))
    except OSError:  # the client has left
        pass


FAILURES: list[tuple[Answer, str, str]] = [
    (status_503, "HTTP 503", "the server is shutting down"),
    (status_500, "HTTP 500", "<html>\ufffdxxx"),
    (cut, "incomplete stream", "the connection was closed before the answer ended"),
    (short, "connection lost", "the connection ended: "),
    (silent, "connection lost", "the connection ended: "),
    (error_event, "error event", "the engine could not compute the request"),
    (no_json, "invalid event", "an event must be a JSON object, got {'a'"),
    (odd_choices, "invalid event", 'choices must be objects, got ["text"]'),
    (whole, "no stream", "the answer must be text/event-stream, got application/json"),
    (empty, "empty answer", "the answer has neither text nor tokens"),
    (slow, "timeout", "the answer did not end within --timeout"),
    (endless_line, "invalid event", "a line must be at most 16777216 bytes, got more"),
]


@pytest.mark.parametrize(("answer", "kind", "message"), FAILURES, ids=[case[0].__name__ for case in FAILURES])
def test_failures(answer: Answer, kind: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One of two requests fails: it is counted with its reason, and the figures are of the other."""

    def every_other(handler: Handler, body: dict[str, Any]) -> None:
        (timed if body["prompt"] == "good" else answer)(handler, body)

    prompts, table = tmp_path / "prompts.txt", tmp_path / "a.csv"
    prompts.write_text("good\nbad\n")
    with scripted(every_other) as server:
        more = ["--prompts", prompts, "--csv", table, "--timeout", 1 if answer is slow else 60]
        status, out, _ = run(capsys, server.url, *more, "--objective", "ttft=60s")
    assert status == 1
    assert f"failed     1 x {kind}: {message}" in out and "requests   1 of 2 succeeded" in out
    assert "goodput    1 of 2 requests (50.0%)" in out
    assert all(len(line) < 300 for line in out.splitlines())
    good, bad = rows_of(table)
    assert (good["error_kind"], bad["error_kind"]) == ("", kind) and bad["error"].startswith(message)
    assert (good["meets_objective"], bad["meets_objective"]) == ("1", "0")


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    status, _, err = run(capsys, url, "--requests", 2)
    assert status == 2 and "--server must be one that answers, got" in err and "could not be reached" in err
    plot = tmp_path / "a.svg"
    status, out, _ = run(capsys, url, "--requests", 2, "--model", "m", "--plot", plot)
    assert status == 1 and "requests   0 of 2 succeeded" in out and "failed     2 x no connection: " in out
    assert "mean" not in out
    assert len(ElementTree.fromstring(plot.read_text()).findall(".//{*}circle")) == 2


@pytest.mark.parametrize("models", [{"data": []}, {"data": "none"}, [], {"data": [{}]}, b"nothing"])
def test_a_server_without_models(models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with scripted(timed, models) as server:
        status, _, err = run(capsys, server.url, "--requests", 1)
        assert status == 2 and f"--model must be given: GET {server.url}/v1/models lists no model: " in err
        assert run(capsys, f"{server.url}/v1/", "--requests", 1, "--model", "mine")[0] == 0
        assert server.seen[0][2]["model"] == "mine"


def test_chats_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Messages and texts, further fields, a key; a server without usage, whose first chunk has the role alone."""

    def chat(handler: Handler, body: dict[str, Any]) -> None:
        handler.begin()
        handler.event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        time.sleep(0.05)
        handler.wfile.write(b": ping\r\n\r\n")
        for name in ("reasoning_content", "content"):
            handler.event({"choices": [{"delta": {name: "text"}, "finish_reason": None}]})
        handler.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})

    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    lines: list[Any] = ["A text", {"messages": messages, "output_tokens": 9}, {"prompt": "naïve"}]
    file, table = tmp_path / "chats.jsonl", tmp_path / "a.csv"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    with scripted(chat) as server:
        more = ["--prompts", file, "--requests", 4, "--concurrency", 1, "--api-key", "secret", "--csv", table]
        body = '{"temperature": 0.5, "top_k": 4}'
        status, out, _ = run(capsys, server.url, "--endpoint", "chat", *more, "--body", body, "--output-tokens", 5)
        assert status == 0 and "note       4 answers had no usage: their output tokens are chunks with text" in out
        assert "secret" not in out
        seen = server.seen
    assert all(float(row["ttft_ms"]) >= 50 for row in rows_of(table))  # not the time of the role
    assert {row["output_tokens"] for row in rows_of(table)} == {"2"}
    as_user = lambda text: [{"role": "user", "content": text}]
    assert [body["messages"] for _, _, body in seen] == [
        as_user("A text"),
        messages,
        as_user("naïve"),
        as_user("A text"),
    ]
    assert [body["max_tokens"] for _, _, body in seen] == [5, 9, 5, 5]
    for path, headers, body in seen:
        assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
        assert (body["temperature"], body["top_k"]) == (0.5, 4) and "ignore_eos" not in body


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--rate", "0"], "--rate must be a number of requests a second above 0, or inf, got '0'"),
        (["--rate", "nan"], "--rate must be a number of requests a second above 0, or inf, got 'nan'"),
        (["--rate", "fast"], "--rate must be a number of requests a second above 0, or inf, got 'fast'"),
        (["--rate", "2", "--concurrency", "2"], "--rate must be left out with --concurrency, got 2"),
        (["--concurrency", "0"], "--concurrency must be at least 1, got 0"),
        (["--requests", "1,8"], "--requests must be a positive integer with --server, got '1,8'"),
        (["--requests", "0"], "--requests must be a positive integer with --server, got '0'"),
        (["--input-len", "0"], "--prompt-tokens must be at least 1, got 0"),
        (["--timeout", "0"], "--timeout must be a number of seconds above 0, got 0"),
        (["--timeout", "nan"], "--timeout must be a number of seconds above 0, got nan"),
        (["--objective", "ttft=200"], "--objective must be times by commas, each of ttft, itl, tpot, e2e at most once"),
        (["--objective", "ttft=1s,ttft=2s"], "--objective must be times by commas"),
        (["--objective", ""], "--objective must be times by commas"),
        (["--body", "[]"], "--body must be a JSON object, got '[]'"),
        (["--body", '{"stream": false}'], "--body must leave stream out"),
        (["--plot", "a.pdf"], "--plot must end in .svg or .png, got 'a.pdf'"),
        (["--plot", "no/such/a.svg"], "--plot must be a file in a folder that exists, got no/such/a.svg"),
        (["--csv", "."], "--csv must be a file in a folder that exists, got ."),
        (["--prompts", "no-such"], "--prompts must be a file of UTF-8 text, got no-such"),
        (["--vocab-size", "9", "--endpoint", "chat"], "--vocab-size must be left out with --endpoint chat"),
        (["--vocab-size", "0"], "--vocab-size must be at least 1, got 0"),
        (["--dtype", "bfloat16"], "--dtype must be left out with --server, got 'bfloat16'"),
        (["--rounds", "3"], "--rounds must be left out with --server, got 3"),
    ],
)
def test_bad_options(more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "http://127.0.0.1:9", *more)
    assert status == 2 and err.startswith(f"torch_infini bench: {sentence}")


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://a", "http://", "http://a:port", "http://a?b=1", "http://a:0"]
)
def test_what_is_no_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, url)
    assert status == 2 and f"--server must be a URL as http://127.0.0.1:8000, got {url!r}" in err


def test_options_of_a_server_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--rate", "3"]) == 2
    assert "--rate must be left out without --server, got '3'" in capsys.readouterr().err
    assert interface_of("https://host/prefix/") == "https://host/prefix/v1"


@pytest.mark.parametrize("package", ["aiohttp", "cairosvg"])
def test_missing_packages(package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch_infini.commands.load.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    status, _, err = run(capsys, "http://127.0.0.1:9", "--plot", "a.png")
    want = {"aiohttp": "pip install 'torch_infini[bench]'", "cairosvg": "pip install cairosvg"}
    assert status == 2 and want[package] in err


def test_prompts(tmp_path: Path) -> None:
    from torch_infini.commands import CommandError

    words = random_prompts(3, 50, 7, seed=1)
    assert words == random_prompts(3, 50, 7, seed=1) != random_prompts(3, 50, 7, seed=2)
    assert [len(str(prompt.content).split()) for prompt in words] == [50] * 3
    ids = random_prompts(2, 50, 7, seed=1, vocabulary=10)[0].content
    assert len(ids) == 50 and set(ids) <= set(range(10))
    bad = {
        "": "a prompt in a line",
        "{": "line 1 of",
        "5": "a line must be a text or an object with prompt, got 5",
        '{"prompt": [1, -1]}': "must have prompt, a text or token ids",
        '{"messages": []}': "must have prompt, a text or token ids",
        '"a"\n{"prompt": "b", "output_tokens": 0}': "line 2 of",
        '{"prompt": "b", "output_tokens": true}': "output_tokens must be an integer of at least 1, got True",
    }
    file = tmp_path / "a.jsonl"
    for text, sentence in bad.items():
        file.write_text(text)
        with pytest.raises(CommandError, match="--prompts") as caught:
            read_prompts(str(file), "completions", 4)
        assert sentence in str(caught.value)
    file.write_text('{"prompt": [1, 2], "output_tokens": 3}')
    assert read_prompts(str(file), "completions", 4)[0].body("completions") == {"prompt": [1, 2], "max_tokens": 3}
    with pytest.raises(CommandError, match="prompt, a text, or messages"):
        read_prompts(str(file), "chat", 4)
    (tmp_path / "a.txt").write_bytes(b"\xff\n")
    with pytest.raises(CommandError, match="UTF-8"):
        read_prompts(str(tmp_path / "a.txt"), "chat", 4)


def test_events_however_they_are_cut() -> None:
    data = b': ping\r\n\r\ndata: {"a": "\xe2\x98\x95"}\r\n\r\ndata:1\ndata: 2\n\nevent: x\n\ndata: [DONE]\n\n'
    want = ['{"a": "☕"}'.encode(), b"1\n2", b"[DONE]"]
    for size in range(1, len(data)):
        events = Events()
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert [event for part in parts for event in events.add(part)] == want
    with pytest.raises(Failed, match="at most"):
        list(Events().add(b"x" * (17 << 20)))


def test_figures() -> None:
    numpy = pytest.importorskip("numpy")
    values = sorted([0.3, 0.1, 2.0, 0.7, 0.2])
    for percent in (0, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))
    assert math.isnan(percentile([], 50))
    objective = objective_of("ttft=200ms, itl=50000us,e2e=2.5s")
    assert objective == Objective({"ttft": 0.2, "itl": 0.05, "e2e": 2.5})
    fast = Result(0, ttft=0.2, gaps=[0.04, 0.06], e2e=2.5, input_tokens=3, output_tokens=5)
    assert fast.tpot == pytest.approx(0.025) and objective.is_met(fast)
    others = [
        Result(1, ttft=0.21, gaps=[0.01], e2e=1, output_tokens=2),
        Result(2, ttft=0.1, gaps=[0.2], e2e=1, output_tokens=2),
        Result(3, ttft=0.1, gaps=[0.01], e2e=3, output_tokens=2),
        Result(4, ttft=None, e2e=1, output_tokens=2),
        Result(5, ttft=0.1, gaps=[0.01], e2e=1, output_tokens=2, failure=Failure("timeout", "late")),
    ]
    assert not any(map(objective.is_met, others))
    single = Result(6, ttft=0.1, e2e=0.1, output_tokens=1)
    summary = Summary([fast, *others, single], 2.0, objective)
    assert summary.met == 2 and "goodput    2 of 7 requests (28.6%)" in text_of(summary)
    assert len(summary.times("itl")) == 5 and len(summary.times("ttft")) == 5 and len(summary.times("tpot")) == 4
    assert ElementTree.fromstring(figure(summary)) is not None
    for most in (1e-9, 0.7, 1.0, 3.3, 99, 100, 12345.6):
        marks = ticks(most)
        assert 2 <= len(marks) <= 7 and marks[0] == 0 and marks[-1] >= most * (1 - 1e-6)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_our_server(endpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx2")
    from support.serving import save_model, service_of, serving
    from torch_infini import AsyncLLM

    table = tmp_path / "a.csv"
    ids = ["--vocab-size", 320] if endpoint == "completions" else []
    with closing(AsyncLLM(save_model(tmp_path / "model"))) as llm, serving(service_of(llm, api_key="k")) as url:
        more = ["--requests", 12, "--rate", 200, "--input-len", 9, "--output-len", 20, "--csv", table, *ids]
        status, out, _ = run(capsys, url, "--endpoint", endpoint, *more, "--api-key", "k")
        assert status == 0, out
        rows = rows_of(table)
        assert {row["output_tokens"] for row in rows} == {"20"} and "tokens" in out
        if ids:
            assert {row["input_tokens"] for row in rows} == {"9"}
        assert all(0 < float(row["ttft_ms"]) < float(row["e2e_ms"]) for row in rows)
        status, out, _ = run(capsys, url, "--requests", 2, "--model", "small", "--api-key", "wrong")
        assert status == 1 and "failed     2 x HTTP 401: " in out
