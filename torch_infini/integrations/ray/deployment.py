"""deployment: the server's application as an application of Ray Serve: replicas, autoscaling, routing by prefixes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ...engine import AsyncLLM
from ...serve import ServeSettings, Service, create_app
from ...serve.settings import MAX_BODY_WITH_IMAGES

_NAME = "torch_infini.integrations.ray.deployment"
PREFIX_ROUTERS = (  # where releases of Ray have it; the first needs vLLM to be imported
    ("ray.serve.llm.request_router", "PrefixCacheAffinityRouter"),
    ("ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router", "PrefixCacheAffinityRouter"),
)
MAX_ONGOING = 256  # requests of a replica; its engine batches them
MAX_PREFIX = 1 << 14  # characters by which a request is routed
ATTEMPTS = 3  # of a request whose replica dies before the answer begins
log = logging.getLogger("torch_infini")


class Routed(NamedTuple):
    """A request as it goes from the ingress to a replica.

    Attributes:
        prompt: What Ray's router compares: the beginning of the prompt or conversation.
        scope: The ASGI scope, without what cannot be sent.
        body: The request's body.
    """

    prompt: str
    scope: dict[str, Any]
    body: bytes


class AppResponse(Response):
    """A response that an ASGI application gives."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class Replica:
    """A server of one replica. Arguments are those of deployment."""

    def __init__(self, model: str, served: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._llm = AsyncLLM(model, **{"progress": False, **settings})
        self._service = Service(self._llm, ServeSettings(**served))
        self._app = create_app(self._service)

    async def __call__(self, request: Request) -> Response:
        return AppResponse(self._app)

    async def answer(self, routed: Routed) -> AsyncIterator[dict[str, Any]]:
        """Yield the ASGI messages of the answer; ending the iterator tells the application that the client has left."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        gone, received = asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal received
            if received:
                await gone.wait()
                return {"type": "http.disconnect"}
            received = True
            return {"type": "http.request", "body": routed.body, "more_body": False}

        async def send(message: Any) -> None:
            messages.put_nowait(dict(message))

        async def run() -> None:
            try:
                await self._app(routed.scope, receive, send)
            finally:
                messages.put_nowait(None)

        running = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await running
        finally:
            gone.set()
            await asyncio.gather(running, return_exceptions=True)

    async def check_health(self) -> None:
        """Raise where no request can be served; Ray then replaces this replica."""
        self._service.check_health()


class Ingress:
    """Takes HTTP requests, and gives them to the replica that Ray's router chooses by their prompts."""

    def __init__(self, replicas: serve.handle.DeploymentHandle, max_body: int) -> None:
        self._replicas, self._max_body = replicas.options(stream=True), max_body

    async def __call__(self, request: Request) -> Response:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body:  # one more byte: the replica's application answers with its error
                break
        kept = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
        scope = {name: request.scope[name] for name in (*kept, "headers", "client", "server") if name in request.scope}
        routed = Routed(prefix_of(scope["path"], body), scope, body[: self._max_body + 1])

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._forward(routed, receive, send)

        return AppResponse(app)

    async def _forward(self, routed: Routed, receive: Receive, send: Send) -> None:
        """Send a replica's answer; another's, if the replica dies before the answer has begun."""
        for attempt in range(ATTEMPTS):
            has_begun = False
            answer = self._replicas.answer.remote(routed)
            try:
                async for message in answer:
                    has_begun = True
                    await send(message)
                return
            except (ActorDiedError, ActorUnavailableError) as error:
                if has_begun:
                    raise
                log.warning("%s: a replica died before it answered (attempt %d): %s", _NAME, attempt + 1, error)
            except asyncio.CancelledError:  # the client has left
                answer.cancel()
                raise
        body = {"message": "no replica answers", "type": "server_error", "param": None, "code": "no_replica"}
        await JSONResponse({"error": body}, 503, {"Retry-After": "1"})(routed.scope, receive, send)


def prefix_of(path: str, body: bytes) -> str:
    """Return the text by which a request is routed, never empty: two turns of a conversation begin alike."""
    try:
        fields = json.loads(body)
        given = [fields.get(name) for name in ("system", "instructions", "tools", "messages", "prompt", "input")]
    except (ValueError, AttributeError, RecursionError):
        given = []
    text = "".join(json.dumps(value)[:-1] for value in given if value)
    return text[:MAX_PREFIX] or path


def prefix_router() -> str:
    """Return where Ray's router by prefixes is, as it wants to be told; ImportError where this release has none."""
    for module, name in PREFIX_ROUTERS:
        with suppress(ImportError):
            if hasattr(import_module(module), name):
                return f"{module}:{name}"
    raise ImportError(
        f"{_NAME}: prefix_aware needs a release of Ray with PrefixCacheAffinityRouter, got {ray.__version__}"
    )


def deployment(
    model: str | Path,
    *,
    served: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    prefix_aware: bool = False,
    router: Mapping[str, Any] | None = None,
    **settings: Any,
) -> serve.Application:
    """Make an application of Ray Serve whose replicas are servers of torch_infini, with all of its routes.

    Args:
        model: As LLM's: a folder that every node has, a GGUF file, or a name of the hub.
        served: Fields of ServeSettings; model_names is the folder's name unless it is given.
        options: Options of the replicas' serve.deployment: num_replicas, autoscaling_config, ray_actor_options
            ({"num_cpus": N} are the threads of each), ...
        prefix_aware: Whether requests with the same beginning go to the same replica, whose prefix cache has it, by
            Ray's PrefixCacheAffinityRouter. Requests then pass through one more process.
        router: Arguments of that router, such as imbalanced_threshold.
        **settings: Other arguments of LLM: quantization, max_model_len, max_num_seqs, ...

    Returns:
        The application, for serve.run.

    Raises:
        ValueError: For settings that ServeSettings or Ray rejects; router without prefix_aware.
        ImportError: For prefix_aware, if this release of Ray has no such router.

    Example:
        >>> app = deployment("/models/Qwen3-4B", options={"num_replicas": 2, "ray_actor_options": {"num_cpus": 8}})
        >>> serve.run(app)  # http://127.0.0.1:8000/v1/chat/completions
    """
    if router is not None and not prefix_aware:
        raise ValueError(f"{_NAME}: router must be None where prefix_aware is False, got {dict(router)!r}")
    fields = {"model_names": (Path(model).name,), **(served or {})}
    for name in ("model_names", "allow_origins", "adapters"):  # of YAML, these are lists
        if isinstance(fields.get(name), list):
            fields[name] = tuple(fields[name])
    try:
        max_body = ServeSettings(**fields).max_body or MAX_BODY_WITH_IMAGES  # each replica has its own limit too
    except TypeError as error:
        raise ValueError(f"{_NAME}: served must have fields of ServeSettings, got an error: {error}") from error
    chosen = {"name": "torch_infini", "max_ongoing_requests": MAX_ONGOING, **(options or {})}
    if prefix_aware:
        chosen["request_router_config"] = serve.config.RequestRouterConfig(
            request_router_class=prefix_router(), request_router_kwargs=dict(router or {})
        )
    warn_of_cpus(chosen)
    replicas = serve.deployment(Replica, **chosen).bind(str(model), fields, settings)
    if not prefix_aware:
        return replicas
    ingress = {
        "name": f"{chosen['name']} ingress",
        "max_ongoing_requests": MAX_ONGOING,
        "ray_actor_options": {"num_cpus": 0},
    }
    return serve.deployment(Ingress, **ingress).bind(replicas, max_body)


def warn_of_cpus(options: Mapping[str, Any]) -> None:
    """Log a warning if the cluster has fewer CPUs than the replicas ask for: some would never start."""
    count, each = options.get("num_replicas"), (options.get("ray_actor_options") or {}).get("num_cpus", 1)
    if isinstance(options.get("autoscaling_config"), Mapping):
        count = options["autoscaling_config"].get("max_replicas", count)
    if not isinstance(count, int) or not ray.is_initialized():
        return
    there = ray.cluster_resources().get("CPU", 0)
    if count * each > there:
        log.warning("%s: %d replicas of %g CPUs need %g, the cluster has %g", _NAME, count, each, count * each, there)
