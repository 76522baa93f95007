"""Engines with a model each, while they are measured: the process of one, and the error of its logits.

generate.py says what that error is; it and error_bits.py measure it here.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import MODELS
from peers import protocol
from peers.engines import PEERS, Failure, Process

from torch_infini.testing.shapes import saved_shape

PROMPT, TOKENS = 48, 64  # of the logit error


@dataclass
class Contestant:
    """An engine with weights of one dtype or format.

    Attributes:
        engine: Its name in PEERS.
        name: In the CSV.
        process: Its worker, with the model.
        version: Of the engine.
        weight_bytes: What a step reads.
        linear_bytes: Of these, those of linear layers; 0 where the worker does not say.
        logit_error: By the number of threads that came first: it hardly depends on it.
    """

    engine: str
    name: str
    process: Process
    version: str
    weight_bytes: int
    linear_bytes: int
    logit_error: float


class Contestants:
    """Makes them.

    Args:
        folder: Of models, environments and logs.
        patience: Seconds for one answer.
    """

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder, self.patience = folder, patience
        self.errors: dict[tuple[str, str, str], float] = {}

    def start(self, engine: str, name: str, variant: str, checkpoint: Path, dtype: str, threads: int) -> Contestant:
        """A worker with its model; Failure where there is none."""
        log = self.folder / "logs" / f"{checkpoint.name}-{name.replace(' ', '-')}-{dtype}.log"
        process = Process(PEERS[engine], self.folder, threads, log, self.patience)
        try:
            loaded = process.ask("load", folder=str(checkpoint), variant=variant, dtype=dtype, threads=threads)
            key = (checkpoint.name, name, dtype)
            if key not in self.errors:
                self.errors[key] = self.logit_error(process, checkpoint)
        except Failure:
            process.close()
            raise
        environment = PEERS[engine].environment
        version = ", ".join(filter(None, (loaded["version"], environment.note if environment else "")))
        sizes = loaded["weight_bytes"], loaded.get("linear_bytes", 0)
        return Contestant(engine, name, process, version, *sizes, self.errors[key])

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
        folder = saved_shape(shape, self.folder / "models")
        if not (folder / "reference.npy").exists():
            threads = os.cpu_count() or 1
            reference = Process(PEERS["eager"], self.folder, threads, self.folder / "logs" / "reference.log", 3600)
            reference.ask("load", folder=str(folder), variant="eager", dtype="float32", threads=threads)
            np.save(folder / "reference.npy", self.logits(reference, folder))
            reference.close()
        return folder


def add_options(parser: argparse.ArgumentParser) -> None:
    """--patience and --folder."""
    parser.add_argument("--patience", type=float, default=3600, help="seconds for one answer (default: 3600)")
    parser.add_argument("--folder", type=Path, default=MODELS, help="models and environments (build/peers)")
