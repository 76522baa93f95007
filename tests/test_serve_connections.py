"""Connections of the server: those without a request give way, slow requests end, and every answer is an error object.

With few connections and short times: the limits are settings.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx

from support.serving import Command, send_raw, service_of, serving, slow_down, wait_until
from torch_infini import AsyncLLM
from torch_infini.serve import ServeSettings, bind, bind_all
from torch_infini.serve.connections import HEADROOM, LOG_INTERVAL, _Connection, connection_limit
from torch_infini.serve.lifecycle import ACCEPT_BATCH

pytest_plugins = ["support.serving_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\nContent-Length: 40\r\n"


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def answer(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    """The status, headers and body of all that comes until the server closes the connection."""
    came = b""
    while part := connection.recv(1 << 16):
        came += part
    head, _, body = came.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert int(headers["content-length"]) == len(body) and headers["content-type"] == "application/json"
    return int(first.split()[1]), headers, json.loads(body)["error"]


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("sent", [b"", HEAD], ids=["nothing", "a part of a head"])
def test_idle_connections_give_way(
    llm: AsyncLLM, sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many clients hold connections without a request, a new one is answered; the oldest is closed for it."""
    monkeypatch.setattr(_Connection, "_warned", -LOG_INTERVAL)
    with serving(service_of(llm, max_connections=8)) as url, ExitStack() as stack:
        held = []
        for _ in range(40):
            held.append(stack.enter_context(connect(url)))
            held[-1].sendall(sent)
        assert httpx.get(f"{url}/health").status_code == 200
        wait_until(lambda: sum(not is_closed(one) for one in held) <= 8)
        assert not is_closed(held[-1]), "the oldest are closed first"
    lines = [record.getMessage() for record in caplog.records if "without a request" in record.getMessage()]
    assert len(lines) == 1, "the log says it once a minute"


def test_a_crowd_does_not_hold_up_the_rest(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that come at once wait in the kernel, and are accepted a few at a time."""
    made: list[int] = []  # accepted between two turns of the event loop
    crowded = threading.Event()
    original = _Connection.connection_made

    def turn(connection: _Connection) -> None:
        made.append(0)
        connection.loop.call_soon(turn, connection)

    def connection_made(connection: _Connection, transport: Any) -> None:
        original(connection, transport)
        if made:
            made[-1] += 1
        else:
            turn(connection)
            connection.loop.call_soon(crowded.wait, 60)

    monkeypatch.setattr(_Connection, "connection_made", connection_made)
    with serving(service_of(llm, max_connections=400)) as url, ExitStack() as stack:
        try:
            for _ in range(200):
                stack.enter_context(connect(url))
        finally:
            crowded.set()
        wait_until(lambda: sum(made) == 199)
        assert httpx.get(f"{url}/health").status_code == 200
    assert 0 < max(made) <= ACCEPT_BATCH


def test_requests_are_not_given_up(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every connection has a request, a new one is told so."""
    slow_down(llm, monkeypatch)
    service = service_of(llm, max_connections=2)
    body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
    with serving(service) as url, ExitStack() as stack:
        running = [stack.enter_context(send_raw(url, TEXT, body)) for _ in range(2)]
        wait_until(lambda: service.in_flight == 2)
        status, headers, error = answer(stack.enter_context(connect(url)))
        assert status == 503 and headers["retry-after"] == "1" and headers["connection"] == "close"
        assert error["message"] == "the largest number of connections is open, and all have a request"
        assert service.in_flight == 2 and not any(is_closed(one) for one in running)


@pytest.mark.parametrize(
    ("sent", "rule"),
    [
        (b"", None),
        (HEAD, "the head of a request must arrive within 0.3 s, got a part"),
        (HEAD + b"\r\n", "the body must arrive within 0.3 s, got 0 bytes of it"),
        (HEAD + b'\r\n{"prompt', "the body must arrive within 0.3 s, got 8 bytes of it"),
    ],
    ids=["nothing", "head", "no body", "a part of the body"],
)
def test_slow_requests_end(llm: AsyncLLM, sent: bytes, rule: str | None) -> None:
    with serving(service_of(llm, receive_timeout=0.3)) as url, connect(url) as connection:
        connection.sendall(sent)
        if rule is None:
            assert connection.recv(1) == b"", "closed without a word"
            return
        status, headers, error = answer(connection)
        assert status == 408 and headers["connection"] == "close"
        assert error["message"] == rule and error["code"] == "request_timeout"


def test_drops_do_not_prolong_the_time(llm: AsyncLLM) -> None:
    """A byte now and then is no progress, of the second request of a connection either."""
    with serving(service_of(llm, receive_timeout=0.3)) as url, connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: server\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        with pytest.raises((ConnectionError, TimeoutError, AssertionError)):
            for byte in HEAD * 10:
                connection.sendall(bytes([byte]))
                time.sleep(0.02)
                assert not is_closed(connection)
        assert time.monotonic() - began < 15


def test_the_time_of_an_answer_is_not_limited(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(llm, monkeypatch)
    with serving(service_of(llm, receive_timeout=1)) as url:
        body = {"prompt": "a", "max_tokens": 150, "ignore_eos": True}  # of 10 ms each, at least
        got = httpx.post(f"{url}{TEXT}", json=body, timeout=60)
        assert got.status_code == 200 and got.json()["usage"]["completion_tokens"] == 150


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_bad_http(llm: AsyncLLM, sent: bytes) -> None:
    with serving(service_of(llm)) as url, connect(url) as connection:
        connection.sendall(sent)
        status, headers, error = answer(connection)
        assert status == 400 and headers["connection"] == "close"
        assert error["code"] == "bad_http" and error["type"] == "invalid_request_error"
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("lines", [1, 700], ids=["one", "many"])
@pytest.mark.skipif(find_spec("httptools") is not None, reason="httptools, which uvicorn then uses, has no limit")
def test_a_head_that_is_too_large(llm: AsyncLLM, lines: int) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: a\r\n" + (b"X: " + b"x" * (70_000 // lines) + b"\r\n") * lines
    with serving(service_of(llm)) as url, connect(url) as connection:
        connection.sendall(head)
        status, headers, error = answer(connection)
        assert status == 431 and headers["connection"] == "close" and error["code"] == "head_too_large"
        assert error["message"] == "the head of a request must have at most 65536 bytes, got more"
        assert httpx.get(f"{url}/health", headers={"x": "x" * 60_000}).status_code == 200


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_several_hosts() -> None:
    hosts = ["127.0.0.1", "127.0.0.2", *(["::1"] if has_ipv6() else [])]
    bound = bind_all(hosts, 0)
    assert [one.getsockname()[0] for one in bound] == hosts
    assert len({one.getsockname()[1] for one in bound}) == 1
    port = bound[0].getsockname()[1]
    bound[1].listen()
    with pytest.raises(OSError, match=f"must be free and of this machine, got 127.0.0.2 port {port}: Address already"):
        bind_all(["127.0.0.3", "127.0.0.2"], port)
    bind("127.0.0.3", port).close()  # what was bound before the error is free again
    for one in bound:
        one.close()
    if has_ipv6():
        for one in bind_all(["0.0.0.0", "::"], 0):
            one.close()
    for wrong in ([], ["a", "a"], [""]):
        with pytest.raises(ValueError, match="hosts must be names, all different"):
            bind_all(wrong, 0)
    for host in ("not a name", "x" * 300, "192.0.2.1", "a..b"):
        with pytest.raises(OSError, match=f"got '?{host}"):
            bind_all(["127.0.0.1", host], 0)


@pytest.mark.full
def test_a_command_with_several_hosts(folder: Path, tmp_path: Path) -> None:
    arguments = ["serve", "--model", str(folder), "--port", "0", "--host", "127.0.0.1,127.0.0.2", "--host", "127.0.0.3"]
    command = Command(arguments, tmp_path / "output")
    port = command.url().rpartition(":")[2]
    for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
        assert httpx.get(f"http://{host}:{port}/health").status_code == 200
        assert f"http://{host}:{port}" in command.output.read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.4:{port}/health")
    os.kill(command.process.pid or 0, signal.SIGTERM)
    command.process.join(60)
    assert command.process.exitcode == 0


def test_open_files(caplog: pytest.LogCaptureFixture) -> None:
    """The limit is raised as far as it goes; what it leaves is said once, and no connections at all is an error."""
    code = f"""
import logging, resource
from torch_infini.serve.connections import connection_limit
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (80, 400))
print(connection_limit(200), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
print(connection_limit(5000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
resource.setrlimit(resource.RLIMIT_NOFILE, ({HEADROOM}, {HEADROOM}))
try:
    connection_limit(1)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    first, second, third = done.stdout.splitlines()
    wanted, limit = map(int, first.split())
    assert wanted == 200 and 200 + HEADROOM < limit < 400
    most, limit = map(int, second.split())
    assert limit == 400 and 200 < most < 400 - HEADROOM
    assert done.stderr.strip() == f"at most {most} connections, not 5000: the limit on open files (ulimit -n) is 400"
    assert third.startswith("torch_infini.serve: the limit on open files (ulimit -n) must be at least ")
    assert connection_limit(1) == 1 and resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_connections", 0, "max_connections must be an integer of at least 1, got 0"),
        ("max_connections", True, "max_connections must be an integer of at least 1, got True"),
        ("receive_timeout", -1, "receive_timeout must be a number of seconds, at least 0, got -1"),
        ("receive_timeout", float("nan"), "receive_timeout must be a number of seconds, at least 0, got nan"),
    ],
)
def test_settings(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^torch_infini.serve.ServeSettings: {rule}$"):
        ServeSettings(("a",), **{name: value})


@pytest.mark.full
def test_a_unix_socket_leaves_no_file(folder: Path, tmp_path: Path) -> None:
    """Neither after a server nor where the model could not be read."""
    path = tmp_path / "server.socket"
    command = Command(["serve", "--model", str(folder), "--uds", str(path)], tmp_path / "output")
    wait_until(lambda: "serving " in (tmp_path / "output").read_text() if (tmp_path / "output").exists() else False, 60)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://server") as client:

        def responds() -> bool:
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:  # it is bound, and does not listen yet
                return False

        wait_until(responds)
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    os.kill(command.process.pid or 0, signal.SIGTERM)
    command.process.join(60)
    assert command.process.exitcode == 0 and not path.exists()
    command = Command(["serve", "--model", str(tmp_path), "--uds", str(path)], tmp_path / "other")
    command.process.join(60)
    assert command.process.exitcode == 2 and not path.exists()


@pytest.mark.full
def test_ctrl_c_while_a_model_is_read(folder: Path) -> None:
    """One line, and the status of a program that Ctrl-C ended."""
    code = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # the background of a shell has it ignored
from torch_infini import engine
from torch_infini.__main__ import main
class Slow:
    def __init__(self, *args, **settings):
        signal.raise_signal(signal.SIGINT)
engine.AsyncLLM = Slow
sys.exit(main(["serve", "--port", "0"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 128 + signal.SIGINT and done.stderr == "torch_infini serve: interrupted\n"
