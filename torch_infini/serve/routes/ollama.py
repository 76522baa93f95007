"""Ollama's interface: GET /api/version, /api/tags, /api/ps; POST /api/show, /api/chat, /api/generate, /api/embed."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..conversation import Begun, begin, begin_prompt
from ..embeddings import Embedded, embed
from ..encoding import json_response
from ..ollama import (
    GenerateAnswer,
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaShowBody,
    describe,
    list_entry,
    model_name,
    running_entry,
)
from ..reading import Reading
from ..service import Service
from ..streaming import CLIENT_CLOSED_REQUEST, respond, run_until_disconnect

router = APIRouter()
# The release of Ollama whose interface this is: clients refuse servers whose version is below the one that they need.
OLLAMA_VERSION = "0.14.2"


@router.get("/api/version", response_model=None)
async def ollama_version() -> Response:
    """Answer the release of Ollama whose interface this is."""
    return json_response({"version": OLLAMA_VERSION})


@router.get("/api/tags", response_model=None)
async def tags(request: Request) -> Response:
    """List the names under which the model is served, and its adapters."""
    service: Service = request.app.state.service
    names = (*service.settings.model_names, *service.adapters)
    return json_response({"models": [list_entry(service, name) for name in names]})


@router.get("/api/ps", response_model=None)
async def ps(request: Request) -> Response:
    """List the models that are loaded: all."""
    service: Service = request.app.state.service
    names = (*service.settings.model_names, *service.adapters)
    return json_response({"models": [running_entry(service, name) for name in names]})


@router.post("/api/show", response_model=None)
async def show(body: OllamaShowBody, request: Request) -> Response:
    """Describe a model."""
    service: Service = request.app.state.service
    return json_response(describe(service, service.served(model_name(service, body.given())).name))


@router.post("/api/chat", response_model=None)
async def chat(body: OllamaChatBody, request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    model = model_name(service, body.model)
    if not body.messages:
        body.reject_unsupported()
        return json_response(OllamaChatAnswer(service.served(model).name, None, Reading()).loaded())
    begun = await begin(service, request, body.chat(model), body.defaults())
    return await answered(request, begun, OllamaChatAnswer, body.streams)


@router.post("/api/generate", response_model=None)
async def generate(body: OllamaGenerateBody, request: Request) -> Response:
    """Continue a prompt, or answer it as a user's message."""
    service: Service = request.app.state.service
    model = model_name(service, body.model)
    if not body.prompt:
        body.reject_unsupported()
        return json_response(GenerateAnswer(service.served(model).name, None, Reading()).loaded())
    if body.raw:
        begun = await begin_prompt(service, request, body.text(model), body.defaults())
    else:
        begun = await begin(service, request, body.chat(model), body.defaults())
    return await answered(request, begun, GenerateAnswer, body.streams)


@router.post("/api/embed", response_model=None)
async def embed_texts(body: OllamaEmbedBody, request: Request) -> Response:
    """Answer the embeddings of texts."""
    start = time.perf_counter_ns()
    found = await embedded(request, body, body.input, "input")
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    vectors = [vector.tolist() for vector in found.vectors]
    times = {"total_duration": time.perf_counter_ns() - start, "load_duration": 0}
    return json_response({"model": body.model, "embeddings": vectors, **times, "prompt_eval_count": found.tokens})


@router.post("/api/embeddings", response_model=None)
async def embed_prompt(body: OllamaEmbeddingsBody, request: Request) -> Response:
    """Answer the embedding of a text, as older clients ask for it."""
    found = await embedded(request, body, [body.prompt] if body.prompt else [], "prompt")
    if found is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return json_response({"embedding": found.vectors[0].tolist() if found.vectors else []})


async def embedded(request: Request, body: OllamaEmbeddingsBody, texts: list[str], param: str) -> Embedded | None:
    """Return the vectors of texts, of none for a request that has the model loaded; None: the client has left."""
    service: Service = request.app.state.service
    _, adapter = service.served(model_name(service, body.model))
    params = body.params(service)
    if not texts:
        return Embedded([], 0)
    found: Embedded | None = await run_until_disconnect(request.receive, embed(service, texts, params, adapter, param))
    return found


async def answered(request: Request, begun: Begun | None, kind: type[OllamaAnswer], streams: bool) -> Response:
    """Return the response that sends an answer; None: the client has left."""
    if begun is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    answer = kind(begun.name, request.app.state.service.token_texts, begun.reading)
    return await respond(request, begun.generation, answer, 1, streams, False)
