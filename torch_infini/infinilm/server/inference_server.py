"""InferenceServer: torch_infini.serve with the arguments, flags and defaults of InfiniLM's callers.

python -m torch_infini run -m infinilm.server.inference_server --model_path FOLDER
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine import AsyncLLM
from ...serve import ServeSettings, Service, address_of, bind, create_app, run_server
from ...serve.routes.chat import chat_completions
from ..llm.config import EngineConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

_NAME = "torch_infini.infinilm.server.InferenceServer"
HOST, PORT = "127.0.0.1", 8000


class InferenceServer:
    """A model served over HTTP: /chat/completions, /v1/chat/completions, /health, /v1/models and the other routes of
    `python -m torch_infini serve`.

    Requests may name any model, or none; temperature, top_p, top_k and max_tokens are those of requests that do not
    give them.

    Args:
        model_path, device, ..., enable_graph: The fields of infinilm.llm.EngineConfig.
        host, port: Where it listens; port 0: a free one. The default is this machine alone.
        log_level: Of uvicorn; "info" writes a line for each request.
        **serving: Fields of torch_infini.serve.ServeSettings: api_key, max_queue, max_body, drain, allow_origins.

    Attributes:
        config: The EngineConfig.
        settings: The ServeSettings.

    Raises:
        ValueError: For a value that cannot be served.

    Example:
        >>> InferenceServer("path/to/model", port=8000).start()
    """

    def __init__(
        self,
        model_path: str | Path,
        device: Any = None,
        dtype: Any = "float16",
        tensor_parallel_size: int = 1,
        cache_type: str = "paged",
        max_tokens: int = 4096,
        max_batch_size: int = 16,
        num_blocks: int = 8192,
        block_size: int = 16,
        max_cache_len: int = 4096,
        temperature: float = 1.0,
        top_p: float = 0.8,
        top_k: int = 1,
        host: str = HOST,
        port: int = PORT,
        enable_graph: bool = True,
        log_level: str = "info",
        **serving: Any,
    ) -> None:
        self.config = EngineConfig(
            model_path,
            device=device,
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size,
            cache_type=cache_type,
            max_batch_size=max_batch_size,
            max_tokens=max_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
            max_cache_len=max_cache_len,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            enable_graph=enable_graph,
        )
        params = self.config.default_params()
        sampling = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        name = Path(model_path).resolve().name or "model"
        known = {field.name for field in dataclasses.fields(ServeSettings)} - {"sampling", "any_model"}
        if unknown := sorted(serving.keys() - known):
            raise ValueError(f"{_NAME}: further arguments must be of {', '.join(sorted(known))}, got {unknown[0]}")
        self.settings = ServeSettings(
            **{"model_names": (name,), **serving},
            any_model=True,
            sampling={**sampling, "max_tokens": params.max_tokens},
        )
        self._host, self._port, self._log_level = host, port, log_level

    def create_app(self, llm: AsyncLLM) -> FastAPI:
        """Make the ASGI application of an engine, for a server of the caller's."""
        return with_old_route(create_app(Service(llm, self.settings)))

    def start(self) -> None:
        """Load the model and serve until SIGTERM or Ctrl-C; running requests finish first.

        Raises:
            FileNotFoundError: For a folder or file that is not there.
            OSError: If the address cannot be listened at.
            ValueError: For a config, checkpoint or setting that is not served.
            MemoryError: For a cache that does not fit into memory.
        """
        with bind(self._host, self._port) as listener:  # first: reading the model takes long
            llm = AsyncLLM(**self.config.arguments())
            print(f"serving {self.settings.model_names[0]} at {address_of(listener)}", flush=True)
            run_server(llm, self.settings, listener, self._log_level, with_old_route)

    run = start


def with_old_route(app: FastAPI) -> FastAPI:
    """Add /chat/completions, where clients of InfiniLM's server look first."""
    app.add_api_route("/chat/completions", chat_completions, methods=["POST"], response_model=None)
    return app


def parser() -> argparse.ArgumentParser:
    """Make the parser of the program's flags; each may be written with - or _ between its words."""
    made = argparse.ArgumentParser(prog="infinilm.server.inference_server", description="Serve a model over HTTP.")

    def add(name: str, **settings: Any) -> None:
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        made.add_argument(*names, dest=settings.pop("dest", name), **settings)

    add("model_path", required=True, metavar="FOLDER", help="a Hugging Face folder")
    add("device", help="cpu, cuda or nvidia (default: the first GPU; without one the CPU)")
    for device in ("cpu", "nvidia"):
        add(device, dest="device", action="store_const", const=device, help=f"as --device {device}")
    add("dtype", default="float16", help="of activations and weights (default: float16)")
    for name in ("tp", "tensor_parallel_size"):
        add(name, dest="tensor_parallel_size", type=int, default=1, help="ranks that share the model (default: 1)")
    add("cache_type", choices=("paged", "static"), default="paged", help="default: paged")
    add("max_tokens", type=int, default=4096, help="of an output, unless a request says (default: 4096)")
    add("max_batch_size", type=int, default=16, help="requests that run at a time (default: 16)")
    add("num_blocks", type=int, default=8192, help="of a paged cache (default: 8192)")
    add("block_size", type=int, default=16, help="tokens in a block (default: 16)")
    add("max_cache_len", type=int, default=4096, help="tokens of a request, with a static cache (default: 4096)")
    add("temperature", type=float, default=1.0, help="unless a request says (default: 1.0)")
    add("top_p", type=float, default=0.8, help="unless a request says (default: 0.8)")
    add("top_k", type=int, default=1, help="unless a request says (default: 1)")
    add("host", default=HOST, help=f"where to listen (default: {HOST}, this machine alone)")
    add("port", type=int, default=PORT, help=f"default: {PORT}")
    add("enable_graph", action="store_true", default=True, help="record and replay decode steps (the default)")
    add("log_level", default="info", type=str.lower, choices=("critical", "error", "warning", "info", "debug"))
    add("api_key", help="clients must send it (default: none)")
    add("max_queue", type=int, help="samples that may wait (default: 256)")
    add("drain", type=float, help="seconds for running requests after SIGTERM (default: 30)")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; SystemExit with status 2 and a sentence for bad input."""
    made = parser()
    given = {name: value for name, value in vars(made.parse_args(argv)).items() if value is not None}
    try:
        InferenceServer(**given).start()
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        made.exit(2, f"{made.prog}: {error}\n")


if __name__ == "__main__":
    main()
