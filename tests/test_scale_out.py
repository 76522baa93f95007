"""Ranks on two hosts: two network namespaces with a cable between them, each with a separate /dev/shm. torchrun's
rendezvous and Gloo carry what shared memory cannot; tokens are those of one rank. docs/scale-out.md says how.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from torch_infini.__main__ import main

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


@pytest.mark.full
def test_generate_on_two_hosts(hosts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    generate = ["generate", "--dtype", "float32", "--max-new-tokens", "16", "--prompt", "def main("]
    assert main(generate) == 0
    alone = capsys.readouterr().out.splitlines()
    assert len(alone) > 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable", "INFINI_LOG_LEVEL": "INFO"}
    ranks = []
    for number, name in enumerate(hosts):
        launch = (
            f"--nnodes 2 --node-rank {number} --nproc-per-node 1 --master-addr {HOSTS[0]} --master-port 29500".split()
        )
        command = [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "torch_infini", *generate, "-tp", "2"]
        own_memory = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh"]
        ranks.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *own_memory, *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[0][0].splitlines()[:-1] == alone[:-1]
    assert said[1][0] == ""
