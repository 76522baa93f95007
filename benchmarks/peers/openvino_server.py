"""OpenVINO GenAI's ContinuousBatchingPipeline behind HTTP: python openvino_server.py FOLDER PORT THREADS SEQUENCES.

The package has no server of its own, so this one does no more than is measured: it reads the body of a completion and
streams a chunk for each token, with its number as the text, and the usage at the end. A thread runs the pipeline.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from openvino_models import BATCHED_TOKENS, converted

RUNNING = openvino_genai.GenerationStatus.RUNNING
OnTokens = Callable[[list[int] | None], None]  # gets new tokens of a request, and None at its end


class Pipeline(threading.Thread):
    """Runs requests. Tokens are given in the event loop, after each step, before the next."""

    def __init__(self, folder: Path, threads: int, sequences: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = BATCHED_TOKENS
        scheduler.max_num_seqs = sequences
        options = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "bf16",
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", options)
        self._loop = loop
        self._new: queue.Queue[tuple[list[int], int, OnTokens]] = queue.Queue()
        self._given = threading.Event()

    def add(self, prompt: list[int], tokens: int, on_tokens: OnTokens) -> None:
        self._new.put((prompt, tokens, on_tokens))

    def run(self) -> None:
        running: list[tuple[Any, OnTokens]] = []
        number = 0
        while True:
            while not running or not self._new.empty():
                prompt, tokens, on_tokens = self._new.get()
                config = openvino_genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
                config.set_eos_token_id(0)  # it wants one, though it is to be ignored
                ids = openvino.Tensor(np.array([prompt], np.int64))
                running.append((self._pipeline.add_request(number, ids, config), on_tokens))
                number += 1
            self._pipeline.step()
            new: list[tuple[OnTokens, list[int] | None]] = []
            still = []
            for handle, on_tokens in running:
                has_ended = handle.get_status() != RUNNING  # before it is read: tokens may come between the two
                while handle.can_read():
                    new += [(on_tokens, list(output.generated_ids)) for output in handle.read().values()]
                if has_ended:
                    new.append((on_tokens, None))
                else:
                    still.append((handle, on_tokens))
            running = still
            if new:
                # The loop would hardly get the interpreter's lock during a step.
                self._given.clear()
                self._loop.call_soon_threadsafe(self._give, new)
                self._given.wait()

    def _give(self, new: list[tuple[OnTokens, list[int] | None]]) -> None:
        for on_tokens, tokens in new:
            on_tokens(tokens)
        self._given.set()


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


class Connections:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the only request of a connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            length = next(line for line in head.splitlines() if line.startswith("content-length:"))
            await self._complete(json.loads(await reader.readexactly(int(length.split(":")[1]))), writer)
        await writer.drain()
        writer.close()

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        ended = asyncio.Event()
        count = 0

        def send(tokens: list[int] | None) -> None:
            nonlocal count
            text = "".join(f" {token}" for token in tokens or ())
            writer.write(event({"choices": [{"index": 0, "text": text, "finish_reason": None if text else "length"}]}))
            count += len(tokens or ())
            if tokens is None:
                usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
                writer.write(event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
                ended.set()

        self._pipeline.add(body["prompt"], body["max_tokens"], send)
        await ended.wait()


async def main() -> None:
    folder, port, threads, sequences = Path(sys.argv[1]), *map(int, sys.argv[2:])
    pipeline = Pipeline(converted(folder, "bfloat16"), threads, sequences, asyncio.get_running_loop())
    pipeline.start()
    server = await asyncio.start_server(Connections(pipeline).serve, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
