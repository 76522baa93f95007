"""InferenceServer: torch_infini.serve with the arguments, flags and defaults of InfiniLM's callers.

python -m torch_infini run -m infinilm.server.inference_server --model_path FOLDER
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....engine import AsyncLLM
from ....serve import ServeSettings, Service, address_of, bind, create_app, run_server
from ....serve.routes.chat import chat_completions
from ..llm.config import EngineConfig

if TYPE_CHECKING:
    from fastapi import FastAPI

_NAME = "infinilm.server.InferenceServer"
HOST, PORT = "127.0.0.1", 8000


class InferenceServer:
    """A model served over HTTP: /chat/completions, /v1/chat/completions, /health, /v1/models and the other routes of
    `python -m torch_infini serve`.

    Requests may name any model, or none; temperature, top_p, top_k and max_tokens are the defaults of requests.

    Args:
        model_path, device, ..., enable_graph: The fields of infinilm.llm.EngineConfig.
        host, port: The address; port 0: a free one. By default only this machine can connect.
        log_level: uvicorn's level; "info" logs a line per request.
        **serving: Fields of torch_infini.serve.ServeSettings: api_key, max_queue, max_body, drain, allow_origins.

    Attributes:
        config: The EngineConfig.
        settings: The ServeSettings.

    Raises:
        ValueError: For an invalid value.

    Example:
        >>> InferenceServer("path/to/model", port=8000).start()
    """

    def __init__(
        self,
        model_path: str | Path,
        device: Any = EngineConfig.device,
        dtype: Any = EngineConfig.dtype,
        tensor_parallel_size: int = EngineConfig.tensor_parallel_size,
        cache_type: str = EngineConfig.cache_type,
        max_tokens: int = EngineConfig.max_tokens,
        max_batch_size: int = EngineConfig.max_batch_size,
        num_blocks: int = EngineConfig.num_blocks,
        block_size: int = EngineConfig.block_size,
        max_cache_len: int = EngineConfig.max_cache_len,
        temperature: float = EngineConfig.temperature,
        top_p: float = EngineConfig.top_p,
        top_k: int = EngineConfig.top_k,
        host: str = HOST,
        port: int = PORT,
        enable_graph: bool = EngineConfig.enable_graph,
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
            **{"model_names": (name,), "reasoning_parser": "none", **serving},  # InfiniLM's leaves it in the content
            any_model=True,
            sampling={**sampling, "max_tokens": params.max_tokens},
        )
        self._host, self._port, self._log_level = host, port, log_level

    def create_app(self, llm: AsyncLLM) -> FastAPI:
        """Make the ASGI application of an engine, for the caller's own server."""
        return with_old_route(create_app(Service(llm, self.settings)))

    def start(self) -> None:
        """Load the model and serve until SIGTERM or Ctrl-C; running requests finish first.

        Raises:
            FileNotFoundError: For a folder or file that does not exist.
            OSError: If the address is not available.
            ValueError: For an unsupported config, checkpoint or setting.
            MemoryError: For a cache that does not fit into memory.
        """
        with bind(self._host, self._port) as listener:  # before the slow loading of the model
            llm = AsyncLLM(**self.config.arguments())
            print(f"serving {self.settings.model_names[0]} at {address_of(listener)}", flush=True)
            run_server(llm, self.settings, listener, self._log_level, with_old_route)

    run = start


def with_old_route(app: FastAPI) -> FastAPI:
    """Add /chat/completions, which clients of InfiniLM's server try first."""
    app.add_api_route("/chat/completions", chat_completions, methods=["POST"], response_model=None)
    return app


def parser() -> argparse.ArgumentParser:
    """Make the parser of the program's flags; each may be written with - or _ between words."""
    made = argparse.ArgumentParser(prog="infinilm.server.inference_server", description="Serve a model over HTTP.")

    def add(name: str, **settings: Any) -> None:
        names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        made.add_argument(*names, dest=settings.pop("dest", name), **settings)

    add("model_path", required=True, metavar="FOLDER", help="a Hugging Face folder")
    add("device", help="cpu, cuda or nvidia (default: the first GPU; without one the CPU)")
    for device in ("cpu", "nvidia"):
        add(device, dest="device", action="store_const", const=device, help=f"as --device {device}")
    add("dtype", default=EngineConfig.dtype, help="of activations and weights (default: %(default)s)")
    ranks = EngineConfig.tensor_parallel_size
    for name in ("tp", "tensor_parallel_size"):
        add(
            name,
            dest="tensor_parallel_size",
            type=int,
            default=ranks,
            help="that share the model (default: %(default)s)",
        )
    add("cache_type", choices=("paged", "static"), default=EngineConfig.cache_type, help="default: %(default)s")
    for name, help in (
        ("max_tokens", "of an output, unless a request says"),
        ("max_batch_size", "requests that run at a time"),
        ("num_blocks", "of a paged cache"),
        ("block_size", "tokens in a block"),
        ("max_cache_len", "tokens of a request, with a static cache"),
        ("temperature", "unless a request says"),
        ("top_p", "unless a request says"),
        ("top_k", "unless a request says"),
    ):
        default = getattr(EngineConfig, name)
        add(name, type=type(default), default=default, help=f"{help} (default: %(default)s)")
    add("host", default=HOST, help=f"where to listen (default: {HOST}, this machine alone)")
    add("port", type=int, default=PORT, help=f"default: {PORT}")
    add("enable_graph", action="store_true", default=True, help="record and replay decode steps (the default)")
    add("log_level", default="info", type=str.lower, choices=("critical", "error", "warning", "info", "debug"))
    add("api_key", help="clients must send it (default: none)")
    add("max_queue", type=int, help="samples that may wait (default: 256)")
    add("drain", type=float, help="seconds for running requests after SIGTERM (default: 30)")
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program; SystemExit with status 2 and a message for invalid input."""
    made = parser()
    given = {name: value for name, value in vars(made.parse_args(argv)).items() if value is not None}
    try:
        InferenceServer(**given).start()
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        made.exit(2, f"{made.prog}: {error}\n")


if __name__ == "__main__":
    main()
