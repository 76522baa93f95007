"""Short programs for Python in processes of their own, without the two seconds that each would import torch for.

They are forks of a process that has imported torch, and what else is asked for. What tests the start of a process, or
needs variables that torch and what it loads read at their start (LD_PRELOAD, OMP_WAIT_POLICY), starts one by itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent

# A line of JSON comes in for each program; its process's id, and at its end its status go out. A fork leaves the loop
# and runs the program as the last thing of its module, so that it ends as every interpreter does.
_SERVER = """
def _serve():
    import json, os, sys, torch
    for line in sys.stdin.buffer:
        asked, child = json.loads(line), os.fork()
        if child == 0:
            break
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        os._exit(0)
    for number, name in enumerate((os.devnull, *asked["files"])):
        os.dup2(os.open(name, os.O_WRONLY if number else os.O_RDONLY), number)
    os.chdir(asked["folder"])
    for name in set(os.environ) - set(asked["environment"]):
        del os.environ[name]
    os.environ.update(asked["environment"])
    sys.argv[:] = ["-c", *asked["arguments"]]
    sys.path[:0] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    return compile(asked["code"], "<string>", "exec")

_code = _serve()
del _serve
exec(_code)
"""


@functools.cache
def _server(of: int, imported: str) -> subprocess.Popen[bytes]:
    """The process that forks, started by the first program of the process `of`."""
    code = f"import {imported}\n{_SERVER}"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def run_python(
    code: str,
    *arguments: Any,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 300,
    check: bool = False,
    imported: str = "torch",
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, ...)`.

    `imported` names the modules, with commas, that the process has from its start.
    """
    server = _server(os.getpid(), imported)
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as kept:
        files = [Path(kept) / name for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        asked = {
            "code": code,
            "arguments": [str(argument) for argument in arguments],
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd),
            "files": [str(file) for file in files],
        }
        server.stdin.write(json.dumps(asked).encode() + b"\n")
        server.stdin.flush()
        child, expired = int(server.stdout.readline()), threading.Event()

        def end() -> None:
            expired.set()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

        timer = threading.Timer(timeout, end)
        timer.start()
        try:
            status = int(server.stdout.readline())
        finally:
            timer.cancel()
        out, err = (file.read_text() for file in files)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    if expired.is_set():
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    done = subprocess.CompletedProcess(command, status, out, err)
    if check:
        done.check_returncode()
    return done
