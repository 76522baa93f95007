"""The model options of generate, chat, bench and serve, and model loading with errors for the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..demo import MODEL
from ..weights import names
from .errors import CommandError

if TYPE_CHECKING:
    from ..engine import LLM, AsyncLLM

MOST_THREADS = 1024
T = TypeVar("T")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a Hugging Face folder, a GGUF file or a name of the hub (default: the small one here)",
    )
    parser.add_argument(
        "--quantization",
        "-q",
        metavar="FORMAT",
        choices=names(),
        help=f"quantize the linear layers: {', '.join(names())}",
    )
    parser.add_argument(
        "--activations", choices=("int8",), help="of layers of a quantized checkpoint (default: as it says)"
    )
    parser.add_argument("--kv-cache-dtype", choices=("int8",), help="of keys and values (default: the model's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the checkpoint's")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=1,
        metavar="N",
        help="ranks that share the model (default: 1)",
    )
    parser.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="give each rank some experts of a mixture as a whole, not some columns of all",
    )
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='guess next tokens: \'{"method": "ngram", "num_speculative_tokens": 4}\' (default: no guesses)',
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: torch's own choice")


def load(arguments: argparse.Namespace, **settings: Any) -> LLM:
    """Load an LLM that generates from the arguments; CommandError if that fails."""
    from ..engine import LLM

    llm = make(LLM, arguments, settings)
    try:
        llm.engine.check_generates()
    except ValueError as error:
        raise CommandError(str(error)) from None
    return llm


def load_async(arguments: argparse.Namespace, **settings: Any) -> AsyncLLM:
    """Load an AsyncLLM from the arguments; CommandError if that fails."""
    from ..engine import AsyncLLM

    return make(AsyncLLM, arguments, settings)


def json_of(option: str, text: str) -> Any:
    """Return the value of an option in JSON; CommandError for another text."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandError(f"{option} must be JSON, got {text}") from error


def make(kind: Callable[..., T], arguments: argparse.Namespace, settings: dict[str, Any]) -> T:
    """Make an engine front end with the model options and these settings; CommandError if that fails."""
    import torch

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise CommandError(f"--threads must be at least 1, got {arguments.threads}")
        if arguments.threads > MOST_THREADS:
            raise CommandError(f"--threads must be at most {MOST_THREADS}, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    if arguments.speculative_config is not None:
        guesses = json_of("--speculative-config", arguments.speculative_config)
        settings = {**settings, "speculative_config": guesses}
    try:
        return kind(
            arguments.model or MODEL,
            quantization=arguments.quantization,
            activations=arguments.activations,
            dtype=arguments.dtype,
            device=arguments.device,
            kv_cache_dtype=arguments.kv_cache_dtype,
            tensor_parallel_size=arguments.tensor_parallel_size,
            enable_expert_parallel=arguments.enable_expert_parallel,
            **settings,
        )
    except (
        OSError,
        ValueError,
        RuntimeError,
        MemoryError,
        AssertionError,
    ) as error:  # the last is torch's error for a missing CUDA
        raise CommandError(str(error)) from error
