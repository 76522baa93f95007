"""serve: an HTTP server with OpenAI's API for a model folder."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config_file import OptionTable, read_text, warn_if_public
from .errors import CommandError
from .model import add_model_arguments, json_of, load, load_async

if TYPE_CHECKING:
    from ..engine import LoRARequest

HELP = "serve a model over HTTP, with OpenAI's interface"
# Seconds after which a thread gives Python's lock to another that waits: the engine's waits for it between two steps,
# and the event loop's may hold it for 5 ms by default, which costs 8 % of the tokens of 32 streams.
SWITCH_INTERVAL = 1e-3
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
HOST = "127.0.0.1"
MAX_KEY = 4096  # bytes of the file of a key

# Fields of EngineConfig that are numbers, as --max-num-seqs.
ENGINE = {
    "max_num_seqs": "samples in a step (default: 32)",
    "max_model_len": "tokens of a prompt and its output (default: the model's positions)",
    "cache_bytes": "bytes for keys and values (default: at most 2 GiB)",
    "cache_blocks": "the same in blocks",
    "block_size": "tokens in a block of the cache (default: 32)",
    "max_num_batched_tokens": "prompt tokens in a step (default: 512)",
    "chunk_size": "prompts are cut at multiples of this (default: 64, or 128 without grouped heads)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML with these options by their long names, without dashes (port: 8000); those of the command line win",
    )
    parser.add_argument(
        "--host",
        action="append",
        metavar="HOST",
        help="where to listen; several with commas, or again (default: 127.0.0.1, this machine alone)",
    )
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0: a free one")
    parser.add_argument("--uds", metavar="PATH", help="listen at a Unix socket instead")
    parser.add_argument(
        "--api-key", metavar="KEY", help="clients must send it (default: INFINI_API_KEY of the environment, if set)"
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="its only line is the key")
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model (default: its folder's, or that of the hub)",
    )
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the tokenizer's")
    parser.add_argument(
        "--tool-parser",
        metavar="NAME",
        help="the form of the model's tool calls (default: auto, that of the chat template; none: no tools)",
    )
    parser.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="how the model marks its reasoning (default: auto, as the chat template does; none: it is content)",
    )
    parser.add_argument("--max-queue", type=int, metavar="N", help="samples that may wait (default: 256)")
    parser.add_argument("--max-body", type=int, metavar="BYTES", help="of a request (default: 4 MiB, with images 32)")
    parser.add_argument(
        "--max-connections", type=int, metavar="N", help="that may be open (default: 4096, as far as ulimit -n goes)"
    )
    parser.add_argument(
        "--receive-timeout",
        type=float,
        metavar="SECONDS",
        help="for the head of a request, and for its body (default: 60)",
    )
    parser.add_argument(
        "--drain", type=float, metavar="SECONDS", help="for running requests after SIGTERM (default: 30)"
    )
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN", help="of web pages that may call (CORS)"
    )
    parser.add_argument("--no-page", action="store_true", help="no chat in the browser at /")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="default: info, a line a request")
    parser.add_argument(
        "--log-requests",
        action="store_true",
        help="a line of JSON a request instead: id, status, tokens, times; no texts",
    )
    parser.add_argument(
        "--limit-mm-per-prompt",
        metavar="JSON",
        help="the most images of a prompt: '{\"image\": 4}' (default: any number, of 67 million pixels in all)",
    )
    for name, text in ENGINE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
    parser.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="auto: requests have the sampling settings of the model's generation_config.json where they give none "
        "(default); none: OpenAI's",
    )
    parser.add_argument(
        "--no-enable-prefix-caching", action="store_true", help="compute every prompt from its beginning"
    )
    parser.add_argument(
        "--no-reuse-generated",
        action="store_true",
        help="reuse no blocks with other requests' output: the same last bits with and without them",
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="an adapter that requests choose by `model`: NAME; again for each further one",
    )
    parser.add_argument("--enforce-eager", action="store_true", help="do not record decode steps for replay")
    table = OptionTable(parser, "config", {"api-key"}, {"api-key": "api-key-file"})
    parser.set_defaults(options=table)


def run(given_arguments: argparse.Namespace) -> int:
    arguments = given_arguments.options.merge(given_arguments)
    if arguments.tensor_parallel_size > 1 and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK") != "0":
        return follow(arguments)
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        from ..serve import ServeSettings, address_of, bind, bind_all, run_server
        from ..serve.lifecycle import remove_socket
    except ImportError as error:
        raise CommandError(str(error)) from error
    name = arguments.model or "demo"
    if Path(name).exists():
        name = Path(name).resolve().name
    given = {
        "api_key": key_of(arguments),
        "max_queue": arguments.max_queue,
        "max_body": arguments.max_body,
        "max_connections": arguments.max_connections,
        "receive_timeout": arguments.receive_timeout,
        "drain": arguments.drain,
        "tool_parser": arguments.tool_parser,
        "reasoning_parser": arguments.reasoning_parser,
    }
    template = None
    try:
        adapters = adapters_of(arguments.lora)
        settings = ServeSettings(
            tuple(arguments.served_model_name or [name]),
            allow_origins=tuple(arguments.allow_origin),
            page=not arguments.no_page,
            log_requests=arguments.log_requests,
            adapters=adapters,
            **{name: value for name, value in given.items() if value is not None},
        )
        if arguments.chat_template is not None:
            template = Path(arguments.chat_template).read_text(encoding="utf-8")
        # Bound before the slow loading of the model, because the address may be in use.
        if arguments.uds is not None:
            listeners = [bind("", arguments.port, arguments.uds)]
        else:
            hosts = [host.strip() for given in arguments.host or [HOST] for host in given.split(",")]
            listeners = bind_all(hosts, arguments.port)
    except (OSError, OverflowError, ValueError) as error:
        raise CommandError(str(error)) from error
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        try:
            try:
                llm = load_async(arguments, **engine_settings(arguments, adapters))
                for adapter in adapters:
                    llm.engine.load_adapter(adapter)
            except (OSError, ValueError) as error:
                raise CommandError(str(error)) from error
            if template is not None:
                if llm.engine.tokenizer is None:
                    raise CommandError("--chat-template must not be given where the model's folder has no tokenizer")
                llm.engine.tokenizer.chat_template = template
            addresses = " and ".join(map(address_of, listeners))
            print(f"serving {settings.model_names[0]} at {addresses}", flush=True)
            run_server(llm, settings, listeners, arguments.log_level)
        finally:
            if arguments.uds is not None:
                remove_socket(arguments.uds)
    return 0


def engine_settings(arguments: argparse.Namespace, adapters: Sequence[LoRARequest]) -> dict[str, Any]:
    """Return the arguments of LLM besides those of the model; errors are those of reading the adapters."""
    from ..engine.lora import largest_rank

    slots: dict[str, Any] = {}
    if adapters:
        slots = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": largest_rank(adapters)}
    numbers = {name: getattr(arguments, name) for name in ENGINE}
    if arguments.limit_mm_per_prompt is not None:
        numbers["limit_mm_per_prompt"] = json_of("--limit-mm-per-prompt", arguments.limit_mm_per_prompt)
    return {
        **{name: value for name, value in numbers.items() if value is not None},
        "enable_prefix_caching": not arguments.no_enable_prefix_caching,
        "enforce_eager": arguments.enforce_eager,
        "reuse_generated": not arguments.no_reuse_generated,
        "generation_config": arguments.generation_config,
        **slots,
    }


def follow(arguments: argparse.Namespace) -> int:
    """Compute the steps of rank 0's server, on another rank of torchrun.

    Signals go to all ranks. Rank 0 drains and then ends the others, and its end alone does so too.
    """
    try:
        llm = load(arguments, **engine_settings(arguments, adapters_of(arguments.lora)))
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        llm.follow()
    except RuntimeError as error:
        raise CommandError(f"rank 0 has ended, or a step failed: {error}") from error
    return 0


def key_of(arguments: argparse.Namespace) -> str | None:
    """Return the server's key, or None; CommandError for a file that is not one line, or both options."""
    if arguments.api_key_file is None:
        return os.environ.get("INFINI_API_KEY") if arguments.api_key is None else arguments.api_key
    if arguments.api_key is not None:
        raise CommandError("--api-key must not be given beside --api-key-file, got both")
    key = read_text(arguments.api_key_file, "--api-key-file", MAX_KEY).strip()
    if len(key.splitlines()) != 1:
        came = f"{arguments.api_key_file!r} with {len(key.splitlines())}"
        raise CommandError(f"--api-key-file must name a file of one line, got {came}")
    warn_if_public(arguments.api_key_file)
    return key


def adapters_of(given: Sequence[str]) -> tuple[LoRARequest, ...]:
    """Return the adapters of --lora; ValueError for one that is not NAME=FOLDER."""
    from ..engine import LoRARequest

    found = []
    for number, text in enumerate(given, 1):
        name, _, folder = text.partition("=")
        if not name or not folder:
            raise ValueError(f"--lora must be NAME=FOLDER, got {text!r}")
        found.append(LoRARequest(name, number, folder))
    return tuple(found)
