"""Ranks on two hosts: two network namespaces with a cable between them, each with a separate /dev/shm. torchrun's
rendezvous and Gloo carry what shared memory cannot; tokens are those of one rank. docs/scale-out.md says how.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_infini import LLM, SamplingParams
from torch_infini.__main__ import main
from torch_infini.demo import MODEL

HOSTS = ("10.199.7.1", "10.199.7.2")


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=check, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces with the addresses HOSTS."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs ip and unshare")
    names = [f"infini-{os.getpid()}-{side}" for side in "ab"]
    cable = [f"infini{os.getpid() % 100000}{side}" for side in "ab"]
    try:
        if (made := run("ip", "netns", "add", names[0], check=False)).returncode:
            pytest.skip(f"needs the right to make network namespaces: {made.stderr.strip()}")
        run("ip", "netns", "add", names[1])
        run("ip", "link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for name, end, address in zip(names, cable, HOSTS, strict=True):
            run("ip", "link", "set", end, "netns", name)
            run("ip", "-n", name, "link", "set", end, "name", "cable")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "cable")
            run("ip", "-n", name, "link", "set", "cable", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            run("ip", "netns", "delete", name, check=False)
        run("ip", "link", "delete", cable[0], check=False)


def launch(hosts: list[str], *command: str) -> list[subprocess.Popen[str]]:
    """Start a command of torch_infini on both hosts by torchrun."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable", "INFINI_LOG_LEVEL": "INFO"}
    started = []
    for number, name in enumerate(hosts):
        options = (
            f"--nnodes 2 --node-rank {number} --nproc-per-node 1 --master-addr {HOSTS[0]} --master-port 29500".split()
        )
        program = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "torch_infini", *command]
        own_memory = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *own_memory, *program],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def outputs_of(ranks: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    try:
        return [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.full
def test_generate_on_two_hosts(hosts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    generate = ["generate", "--dtype", "float32", "--max-new-tokens", "16", "--prompt", "def main("]
    assert main(generate) == 0
    alone = capsys.readouterr().out.splitlines()
    assert len(alone) > 1
    ranks = launch(hosts, *generate, "-tp", "2")
    said = outputs_of(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[0][0].splitlines()[:-1] == alone[:-1]
    assert said[1][0] == ""


@pytest.mark.full
def test_serve_on_two_hosts(hosts: list[str]) -> None:
    """Rank 0 has the address; SIGTERM to its torchrun ends both hosts with status 0."""
    pytest.importorskip("fastapi")
    body = {"prompt": "def main(", "temperature": 0, "max_tokens": 16}
    asking = (
        "import json, urllib.request as r\n"
        f"q = r.Request('http://127.0.0.1:8000/v1/completions', json.dumps({body!r}).encode(), "
        "{'Content-Type': 'application/json'})\n"
        "print(json.load(r.urlopen(q, timeout=60))['choices'][0]['text'])"
    )
    ranks = launch(hosts, "serve", "--dtype", "float32", "-tp", "2")
    texts = []
    try:
        for _ in range(60):
            asked = run("ip", "netns", "exec", hosts[0], sys.executable, "-c", asking, check=False)
            texts += [asked.stdout] if asked.returncode == 0 else []
            if len(texts) == 2 or any(rank.poll() is not None for rank in ranks):
                break
            time.sleep(0 if texts else 1)
        for pid in children_of(ranks[0].pid):
            os.kill(pid, signal.SIGTERM)
    finally:
        said = outputs_of(ranks)
    wanted = LLM(MODEL, dtype="float32").generate(body["prompt"], SamplingParams.greedy(max_tokens=16))
    assert texts == [f"{wanted[0].outputs[0].text}\n"] * 2, said
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "serving demo at" in said[0][0] and said[1][0] == ""


def children_of(pid: int) -> list[int]:
    """Return the processes of torch_infini below a process."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        command = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        found += [child] if b"torch_infini" in command and b"torch.distributed.run" not in command else []
        found += children_of(child)
    return found
