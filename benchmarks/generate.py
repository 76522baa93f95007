"""Generation with Llama models of random weights: torch as it is, compiled, packed; llama.cpp; OpenVINO; torch_infini.

    python benchmarks/generate.py --threads 1,2        # results/CPU/generate.csv, and a plot beside it

Every engine has its own process (peers/) and, where it is not of this environment, its own virtual environment, made
in build/peers at the first run (minutes: llama.cpp is compiled). All of a cell take turns in every round, and medians
count. What cannot be installed or fails stands in the CSV in words. logit_error is the root mean square of the distance
from the float32 logits of the same bfloat16 weights, over theirs: the last of 48 tokens at once, then 16 one by one.
share_of_limit: of a step's time, what reading its weights takes at the measured bandwidth. engine_ratio: the rate of
torch_infini's engine over this one's, in the same rounds.

Cells besides the default ones: serve, many requests at once, tokens of their outputs a second; prefix, a first token
behind a prefix that is in the cache and behind another one; read, a checkpoint's loading out of the page cache, and
reading its files as they are into fresh memory.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import numpy as np
import plot
from harness import HERE, MODELS, Results
from peers import protocol

from torch_infini._bandwidth import read_bandwidth
from torch_infini._cpu import facts
from torch_infini.testing import threads_set_to
from torch_infini.testing.llama import SHAPES, saved_llama

TORCH = "2.13.0"
PROMPT, TOKENS = 48, 64  # of the logit error
DTYPES = ("bfloat16", "int8", "int4")


class Failure(Exception):
    """Why an engine has no number, in words for the CSV."""


@dataclass(frozen=True)
class Cell:
    """What is measured: `length` is the context of a decode, the prompt of a prefill or of generate(), a prefix;
    `batch` is sequences or requests."""

    kind: str
    length: int = 0
    dtypes: tuple[str, ...] = DTYPES
    batch: int = 1


CELLS = {
    "decode-16": Cell("decode", 16),
    "decode-2048": Cell("decode", 2048, ("bfloat16",)),
    "decode-16x8": Cell("decode", 16, ("bfloat16", "int8"), batch=8),
    "prefill-512": Cell("prefill", 512),
    "prefill-2048": Cell("prefill", 2048, ("bfloat16",)),
    "generate": Cell("generate", 16),
    "serve-32": Cell("serve", dtypes=("bfloat16", "int8"), batch=32),
    "prefix-1024": Cell("prefix", 1024),
    "read": Cell("read"),
}
ALONE = ("decode", "prefill", "generate")  # kinds of cells
SHAPE_CELLS = {
    "1.1B": [name for name in CELLS if CELLS[name].kind in ("decode", "prefill")],
    "160M": ["generate"],
    "tiny": list(CELLS),
}


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
    "llama.cpp": Peer(
        "gguf_models.py", {"bfloat16": ("BF16",), "int8": ("Q8_0",), "int4": ("Q4_0", "Q4_K_M")}, LLAMA_CPP
    ),
    "OpenVINO": Peer("openvino_models.py", dict.fromkeys(DTYPES, ("",)), OPENVINO),
    "infini": Peer("torch_models.py", dict.fromkeys(DTYPES, ("infini",))),
    "engine": Peer("engine_models.py", dict.fromkeys(DTYPES, ("",)), kinds=(*ALONE, "serve", "prefix", "read")),
    "ranks": Peer("engine_models.py", dict.fromkeys(DTYPES, ("ranks",)), kinds=(*ALONE, "serve")),
}


COLUMNS = (
    "shape threads cell dtype engine version tokens_per_s seconds engine_ratio share_of_limit logit_error rounds "
    "read_gb_per_s note"
)


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
                [python, "-W", "ignore", HERE / "peers" / peer.script],
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


@dataclass
class Contestant:
    """An engine with weights of one dtype while it is measured."""

    engine: str
    name: str
    process: Process
    version: str
    weight_bytes: int


def label(engine: str, variant: str, dtype: str) -> str:
    """An engine's name in the CSV: with its variant where it has several for weights of this dtype."""
    return f"{engine} {variant}" if len(PEERS[engine].variants[dtype]) > 1 else engine


class Bench:
    """One run: the options, the models, what has been measured."""

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options, self.results = options, results
        self.folder: Path = options.folder
        self.errors: dict[tuple[str, str, str], float] = {}

    def start(self, engine: str, variant: str, checkpoint: Path, dtype: str, threads: int) -> Contestant:
        """A worker with its model, whose logit error is known."""
        name = label(engine, variant, dtype)
        log = self.folder / "logs" / f"{checkpoint.name}-{name.replace(' ', '-')}-{dtype}.log"
        process = Process(PEERS[engine], self.folder, threads, log, self.options.patience)
        try:
            loaded = process.ask("load", folder=str(checkpoint), variant=variant, dtype=dtype, threads=threads)
            environment = PEERS[engine].environment
            version = ", ".join(filter(None, (loaded["version"], environment.note if environment else "")))
            contestant = Contestant(engine, name, process, version, loaded["weight_bytes"])
            key = (checkpoint.name, name, dtype)
            if key not in self.errors:  # of the number of threads that comes first: it hardly depends on it
                self.errors[key] = self.logit_error(process, checkpoint)
        except Failure:
            process.close()
            raise
        return contestant

    def logits(self, process: Process, checkpoint: Path) -> np.ndarray:
        (tokens,) = protocol.prompt(1, TOKENS, protocol.vocabulary(str(checkpoint)))
        out = self.folder / "logs" / f"logits-{os.getpid()}"
        process.ask("logits", tokens=tokens, prompt=PROMPT, out=str(out))
        values = np.fromfile(out, np.float32)
        out.unlink()
        return values

    def logit_error(self, process: Process, checkpoint: Path) -> float:
        reference = np.load(checkpoint / "reference.npy").astype(np.float64)
        distance = self.logits(process, checkpoint) - reference
        return float(np.sqrt((distance**2).mean() / (reference**2).mean()))

    def checkpoint(self, shape: str) -> Path:
        """The Hugging Face folder of a shape, with the float32 logits that all are compared with; made once."""
        folder = saved_llama(shape, self.folder / "models")
        if not (folder / "reference.npy").exists():
            threads = os.cpu_count() or 1
            reference = Process(PEERS["eager"], self.folder, threads, self.folder / "logs" / "reference.log", 3600)
            reference.ask("load", folder=str(folder), variant="eager", dtype="float32", threads=threads)
            np.save(folder / "reference.npy", self.logits(reference, folder))
            reference.close()
        return folder

    def arguments(self, cell: Cell, checkpoint: Path) -> dict[str, Any]:
        """Of the call that measures a cell."""
        steps = self.options.steps
        if cell.kind == "decode":
            return {"batch": cell.batch, "context": cell.length, "steps": steps}
        if cell.kind in ("prefill", "prefix"):
            return {"tokens": cell.length}
        if cell.kind == "serve":
            prompts, outputs = protocol.requests(cell.batch, protocol.vocabulary(str(checkpoint)))
            return {"prompts": prompts, "outputs": outputs}
        return {"prompt": cell.length, "steps": steps} if cell.kind == "generate" else {}

    def measure(
        self, contestants: Sequence[Contestant], cell: Cell, arguments: dict[str, Any]
    ) -> tuple[dict[str, dict[str, float] | Failure], float]:
        """(median seconds by what was timed, or why there are none, by contestant; bytes a second that torch reads).

        What a contestant times is "" where it is one thing.
        """
        times: dict[str, dict[str, list[float]]] = {contestant.name: {} for contestant in contestants}
        failures: dict[str, Failure] = {}
        bandwidth = 0.0
        for turn in range(self.options.rounds + 1):
            bandwidth = max(bandwidth, read_bandwidth(0.2))
            for contestant in contestants:
                if contestant.name in failures:
                    continue
                try:
                    value = contestant.process.ask(cell.kind, **arguments)
                except Failure as failure:
                    failures[contestant.name] = failure
                    continue
                if turn:  # the first turn warms up, and compiles
                    for what, seconds in (value if isinstance(value, dict) else {"": value}).items():
                        times[contestant.name].setdefault(what, []).append(seconds)
        for contestant in contestants:
            if contestant.process.process.poll() is None:
                contestant.process.ask("release")
        medians = {name: {what: statistics.median(t) for what, t in values.items()} for name, values in times.items()}
        return medians | failures, bandwidth

    def add(self, shape: str, threads: int, name: str, dtype: str, engine: str, **values: Any) -> None:
        row = {"shape": shape, "threads": threads, "cell": name, "dtype": dtype, "engine": engine}
        self.results.add({**row, "version": "", "rounds": self.options.rounds, "note": "", **values})

    def group(self, shape: str, threads: int, dtype: str, cells: Sequence[str]) -> None:
        """All cells of a shape with weights of one dtype, by all the engines that have it."""
        checkpoint = self.checkpoint(shape)
        contestants: list[Contestant] = []
        try:
            for engine in self.options.peers:
                mine = [name for name in cells if CELLS[name].kind in PEERS[engine].kinds]
                for variant in PEERS[engine].variants.get(dtype, ()) if mine else ():
                    try:
                        contestants.append(self.start(engine, variant, checkpoint, dtype, threads))
                    except Failure as failure:
                        for name in mine:
                            self.add(shape, threads, name, dtype, label(engine, variant, dtype), note=str(failure))
            for name in cells:
                some = [one for one in contestants if CELLS[name].kind in PEERS[one.engine].kinds]
                self.cell(shape, threads, name, dtype, some)
        finally:
            for contestant in contestants:
                contestant.process.close()

    def cell(self, shape: str, threads: int, name: str, dtype: str, contestants: Sequence[Contestant]) -> None:
        cell = CELLS[name]
        arguments = self.arguments(cell, self.checkpoint(shape))
        tokens = {
            "decode": cell.batch * self.options.steps,
            "prefill": cell.length,
            "generate": self.options.steps,
            "serve": sum(arguments.get("outputs", ())),
        }.get(cell.kind)
        results, bandwidth = self.measure(contestants, cell, arguments)
        ours = results.get("engine")
        for contestant in contestants:
            result = results[contestant.name]
            values: dict[str, Any] = {
                "version": contestant.version,
                "read_gb_per_s": bandwidth / 1e9,
                "logit_error": self.errors[shape, contestant.name, dtype],
            }
            if isinstance(result, Failure):
                self.add(shape, threads, name, dtype, contestant.name, note=str(result), **values)
                continue
            for what, seconds in result.items():
                values["seconds"] = seconds
                if tokens is not None:
                    values["tokens_per_s"] = tokens / seconds
                if isinstance(ours, dict) and "" in ours:
                    values["engine_ratio"] = seconds / ours[""]
                if cell.kind in ("decode", "generate"):  # a prefill is bound by arithmetic
                    steps = self.options.steps / seconds
                    values["share_of_limit"] = steps * contestant.weight_bytes / bandwidth
                who = f"{contestant.name}, {what}" if what else contestant.name
                self.add(shape, threads, name, dtype, who, **values)

    def run(self) -> None:
        for shape in self.options.shapes:
            for threads in self.options.threads:
                with threads_set_to(threads):
                    for dtype in self.options.dtypes:
                        chosen = self.options.cells or SHAPE_CELLS[shape]
                        self.group(shape, threads, dtype, [name for name in chosen if dtype in CELLS[name].dtypes])


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "generate.csv", threads=[1, 2], rounds=5, resume=False)
    some = harness.names
    parser.add_argument("--shapes", type=some("shape", [*SHAPES]), default=["1.1B", "160M"], help="default: 1.1B,160M")
    all_dtypes = f"default: {','.join(DTYPES)}"
    parser.add_argument("--dtypes", type=some("dtype of weights", DTYPES), default=[*DTYPES], help=all_dtypes)
    parser.add_argument(
        "--cells",
        type=some("cell", [*CELLS]),
        help=f"of {','.join(CELLS)} (default: generate for 160M, those of decode and prefill for 1.1B)",
    )
    usual = [name for name in PEERS if name != "ranks"]  # which are no other engine, and need two threads
    parser.add_argument(
        "--peers", type=some("peer", [*PEERS]), default=usual, help=f"default: {','.join(usual)}; ranks"
    )
    help_text = "of a decode measurement and generate() (default: 32)"
    parser.add_argument("--steps", type=harness.count, default=32, help=help_text)
    parser.add_argument("--patience", type=float, default=3600, help="seconds for one answer (default: 3600)")
    parser.add_argument("--folder", type=Path, default=MODELS, help="models and environments (build/peers)")
    options = parser.parse_args(argv)
    with Results(options.out, COLUMNS) as results:
        Bench(options, results).run()
    print(f"drawn in {plot.write(options.out)}")


if __name__ == "__main__":
    main()
