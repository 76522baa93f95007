"""ServeSettings: model names, API key, limits and defaults of a server, checked when they are set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engine import LoRARequest, SamplingParams
from .parsers import all_forms, all_thinkings

_NAME = "torch_infini.serve.ServeSettings"
MAX_QUEUE, DRAIN = 256, 30.0
MAX_BODY, MAX_BODY_WITH_IMAGES = 4 << 20, 32 << 20
MAX_CONNECTIONS, RECEIVE_TIMEOUT = 4096, 60.0


@dataclass(frozen=True)
class ServeSettings:
    """Settings of a server besides those of its engine.

    Attributes:
        model_names: Names that requests may give as `model`; answers have the name that was asked for, or the
            first.
        any_model: Whether requests may give any other name too.
        api_key: The key that requests must send as "Authorization: Bearer KEY" (except GET /health); None: no key.
        max_queue: The most samples that wait, besides the engine's max_num_seqs; more are rejected with status 429.
        max_body: The most bytes of a request's body; larger ones are rejected with status 413. None: 4 MiB, or 32 MiB
            where the model reads images.
        max_connections: The most open connections, within the limit on open files. A new one replaces the one that has
            been without a request for longest; if all have a request, it is rejected with status 503.
        receive_timeout: Seconds for the head of a request to arrive, and then for its body; after that, status 408.
        drain: Seconds for running requests to finish after the first SIGTERM.
        allow_origins: Origins of web pages that may call the server (CORS), besides those of this machine; "*": all.
        page: Whether GET / answers a chat in the browser. Its files need no key; what it asks the server does.
        log_requests: Whether the logger torch_infini.requests gets a line of JSON for each request, without any text.
        sampling: Fields of SamplingParams for requests that do not give them; they override those of the model's
            generation_config.json. A max_tokens here is lowered to what the context leaves, unlike one of a request.
        adapters: LoRA adapters that requests may give by name as `model`; the engine needs enable_lora and as many
            slots (max_loras).
        tool_parser: The form of the model's tool calls: a name of parsers.all_forms(), "auto" for that of the chat
            template, or "none" to reject tools.
        reasoning_parser: How the model marks its reasoning: a name of parsers.all_thinkings(), "auto" for what the chat
            template has, or "none" to leave it in the content.

    Raises:
        ValueError: For an invalid value.
    """

    model_names: tuple[str, ...]
    any_model: bool = False
    api_key: str | None = None
    max_queue: int = MAX_QUEUE
    max_body: int | None = None
    max_connections: int = MAX_CONNECTIONS
    receive_timeout: float = RECEIVE_TIMEOUT
    drain: float = DRAIN
    allow_origins: tuple[str, ...] = ()
    page: bool = True
    log_requests: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[LoRARequest, ...] = ()
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def __post_init__(self) -> None:
        for name in ("model_names", "allow_origins"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(value, str) and value for value in values):
                raise ValueError(f"{_NAME}: {name} must be a tuple of strings, none of them empty, got {values!r}")
        if not self.model_names:
            raise ValueError(f"{_NAME}: model_names must have at least one name, got none")
        if self.api_key is not None and not (isinstance(self.api_key, str) and self.api_key.strip()):
            raise ValueError(f"{_NAME}: api_key must be a string that is not blank, or None, got another")
        for name in ("page", "log_requests"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{_NAME}: {name} must be True or False, got {getattr(self, name)!r}")
        for name, least in (("max_queue", 0), ("max_body", 1), ("max_connections", 1)):
            value = getattr(self, name)
            if value is None and name == "max_body":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{_NAME}: {name} must be an integer of at least {least}, got {value!r}")
        for name in ("drain", "receive_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
                raise ValueError(f"{_NAME}: {name} must be a number of seconds, at least 0, got {value!r}")
        for name, known in (("tool_parser", all_forms()), ("reasoning_parser", all_thinkings())):
            if (value := getattr(self, name)) not in ("auto", "none", *known):
                rule = f"{name} must be auto, none, {', '.join(known)}"
                raise ValueError(f"{_NAME}: {rule}, got {value!r}")
        names = [*self.model_names, *(adapter.lora_name for adapter in self.adapters)]
        if again := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{_NAME}: names of the model and its adapters must differ, got {again[0]} twice")
        try:
            SamplingParams(**self.sampling)
        except TypeError as error:
            raise ValueError(f"{_NAME}: sampling must have fields of SamplingParams, got {error}") from error
