"""Fuzzes a server over the network, then loads it: no status 500, and flat memory and descriptors.

    PYTHONPATH=tests python tests/fuzz/server.py --seconds 300         # or: make fuzz

Starts `python -m torch_infini serve` on a small model with random weights. First random requests to all routes
(support/request_fuzzer.py), then --requests good ones, among them --schemas with a schema each and clients that leave,
then --connections idle ones while /health answers. Exits with 1 after the first fault, and prints the request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import yarl

from support.json_schemas import random_schemas
from support.request_fuzzer import SCORES, VALID, Fuzzer, Sent, fault_of
from support.serving import save_model
from support.tool_answers import TEMPLATES
from torch_infini._core.cpu import cpu_name

AT_ONCE = 8
WARM = 1500  # requests, each with a schema: the caches that they fill (64 grammars, blocks, responses) are no growth
MOST_GROWTH = 6 << 20  # bytes of resident memory from there to the end
MESSAGES = [{"role": "user", "content": "hello"}]


class Fault(Exception):
    """What a server must not do."""


class Served:
    """A server in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "torch_infini", "serve", "--model", str(save_model(folder / "model"))]
        command += ["--port", "0", "--max-num-seqs", "8", "--served-model-name", "small"]
        (folder / "template").write_text(TEMPLATES["hermes"])  # which has tools
        command += ["--chat-template", str(folder / "template")]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.url = self._address()

    def _address(self) -> str:
        for _ in range(600):
            text = self.log.read_text()
            if "startup complete" in text:
                return text.partition("serving small at ")[2].split()[0]
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise Fault(f"the server did not start: {self.log.read_text()[-2000:]}")

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self) -> None:
        """End the server, which must do so by itself."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        if status != 0:
            raise Fault(f"the server ended with {status}: {self.log.read_text()[-2000:]}")


async def send(session: aiohttp.ClientSession, url: str, sent: Sent) -> int:
    """Send a request, judge the answer, and return its status."""
    headers = {} if sent.content_type is None else {"Content-Type": sent.content_type}
    target = yarl.URL(url + sent.path, encoded=True) if sent.path.isascii() else yarl.URL(url + sent.path)
    # aiohttp adds a Content-Type of its own.
    skip = ["Content-Type"] if sent.content_type is None else []
    options: dict[str, Any] = {"data": sent.content or None, "headers": headers, "skip_auto_headers": skip}
    try:
        async with session.request(sent.method, target, **options) as answer:
            text = (await answer.read()).decode("utf-8", "replace")
            fault = fault_of(sent, answer.status, answer.headers.get("Content-Type", ""), text)
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise Fault(f"no answer ({type(error).__name__}: {error}) to {sent}") from None
    if fault is not None:
        raise Fault(f"{fault}: {text[:1000]}\n{sent}")
    return answer.status


async def fuzz(session: aiohttp.ClientSession, url: str, seconds: float, seed: int) -> Counter[int]:
    """Send random requests for some seconds; return how many had each status."""
    async with session.get(f"{url}/openapi.json") as answer:
        fuzzer = Fuzzer(seed, await answer.json())
    end, statuses = time.monotonic() + seconds, Counter[int]()

    async def client() -> None:
        while time.monotonic() < end:
            statuses[await send(session, url, fuzzer.request())] += 1

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return statuses


def load_requests(count: int, schemas: int, seed: int) -> list[tuple[Sent, bool]]:
    """Return WARM requests, then `count` of all routes, some with schemas; and whether the client leaves early."""
    rng = random.Random(seed)
    served = [one for one in VALID if one[0] not in SCORES]
    found = [rng.choice(served) for _ in range(count - schemas)]
    found += [schema_request(schema, number) for number, schema in enumerate(random_schemas(schemas, seed))]
    rng.shuffle(found)
    found = [*(schema_request(one, number) for number, one in enumerate(random_schemas(WARM, seed + 1))), *found]
    kind = "application/json"
    return [(Sent("POST", path, json.dumps(body).encode(), kind), rng.random() < 0.03) for path, body in found]


def schema_request(schema: dict[str, Any], number: int) -> tuple[str, dict[str, Any]]:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    body = {"messages": MESSAGES, "max_tokens": 100, "seed": number, "response_format": form}
    return "/v1/chat/completions", {**body, "stream": number % 2 == 0}


async def leave(session: aiohttp.ClientSession, url: str, path: str) -> None:
    """Begin a long answer, and close the connection after its first bytes."""
    body = {"messages": MESSAGES, "prompt": "a", "input": "a", "max_tokens": 400, "stream": True}
    fields = {"/v1/completions": ("prompt",)}.get(path, ("messages",))
    path = path if path == "/v1/completions" else "/v1/chat/completions"
    chosen = {name: body[name] for name in (*fields, "max_tokens", "stream")}
    async with session.post(url + path, json=chosen) as answer:
        await answer.content.readany()
        answer.close()


async def load(session: aiohttp.ClientSession, served: Served, requests: list[tuple[Sent, bool]]) -> None:
    """Send requests; Fault if memory or descriptors grow after the first WARM of them."""
    every, waiting, done = max(1, (len(requests) - WARM) // 10), iter(requests), 0
    first = last = (0, 0)
    began = 0.0

    async def client() -> None:
        nonlocal done, first, last, began
        for sent, leaves in waiting:
            if leaves:
                await leave(session, served.url, sent.path)
            elif (status := await send(session, served.url, sent)) != 200:
                raise Fault(f"status {status} for a valid request: {sent}")
            done += 1
            if done >= WARM and (done - WARM) % every == 0:
                last = served.resident_bytes(), served.descriptors()
                if done == WARM:
                    first, began = last, time.monotonic()
                print(f"  after {done - WARM:6}: {last[0] / 2**20:7.1f} MiB, {last[1]} descriptors", flush=True)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    print(f"  {(done - WARM) / (time.monotonic() - began):.0f} requests a second", flush=True)
    if last[0] - first[0] > MOST_GROWTH or last[1] > first[1] + AT_ONCE:
        raise Fault(f"growth: {last[0] - first[0]} bytes, descriptors from {first[1]} to {last[1]}")


async def health_times(session: aiohttp.ClientSession, url: str, count: int = 300) -> str:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        async with session.get(f"{url}/health") as answer:
            if answer.status != 200:
                raise Fault(f"/health: status {answer.status}")
        times.append((time.perf_counter() - began) * 1e3)
    cuts = statistics.quantiles(times, n=100)
    return f"/health p50 {cuts[49]:.2f} ms, p99 {cuts[98]:.2f} ms, longest {max(times):.2f} ms"


async def idle(session: aiohttp.ClientSession, served: Served, count: int) -> None:
    """Hold connections that send nothing, and ask for /health and a completion meanwhile."""
    before = served.descriptors()
    print(f"  none:  {await health_times(session, served.url)}", flush=True)
    host, _, port = served.url.removeprefix("http://").partition(":")
    memory = served.resident_bytes()
    connections = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    print(f"  {count}: {await health_times(session, served.url)}", flush=True)
    grown = (served.resident_bytes() - memory) / count / 1024
    print(f"  {served.descriptors() - before} descriptors more, {grown:.1f} KiB each", flush=True)
    body = json.dumps({"prompt": "a", "max_tokens": 8}).encode()
    if await send(session, served.url, Sent("POST", "/v1/completions", body, "application/json")) != 200:
        raise Fault("no completion beside idle connections")
    for _, writer in connections:
        writer.close()
    for _ in range(100):
        if served.descriptors() <= before + AT_ONCE:
            return
        await asyncio.sleep(0.1)
    raise Fault(f"descriptors: {before} before, {served.descriptors()} after the connections were closed")


async def run(served: Served, arguments: argparse.Namespace) -> None:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        if arguments.seconds:
            statuses = await fuzz(session, served.url, arguments.seconds, arguments.seed)
            counts = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
            print(
                f"{sum(statuses.values())} random requests in {arguments.seconds:.0f} s, no fault: {counts}", flush=True
            )
        if arguments.requests:
            print(f"{arguments.requests} requests, {arguments.schemas} of them with schemas:", flush=True)
            await load(session, served, load_requests(arguments.requests, arguments.schemas, arguments.seed))
        if arguments.connections:
            print("idle connections:", flush=True)
            await idle(session, served, arguments.connections)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="of random requests (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=10_000, help="valid ones (default: %(default)s)")
    parser.add_argument("--schemas", type=int, default=500, help="how many of these have one (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=1000, help="idle ones (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (default: %(default)s)")
    arguments = parser.parse_args()
    print(f"on {cpu_name()}", flush=True)
    with TemporaryDirectory() as folder:
        served = Served(Path(folder))
        try:
            asyncio.run(run(served, arguments))
            served.end()
        except Fault as fault:
            print(f"fault: {fault}\nthe server's log ends with:\n{served.log.read_text()[-3000:]}")
            return 1
        finally:
            served.process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
