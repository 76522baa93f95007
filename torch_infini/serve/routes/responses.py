"""POST /v1/responses; GET and DELETE of one that was kept."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..conversation import begin
from ..encoding import json_response
from ..errors import ApiError, shown
from ..responses import ResponsesAnswer, ResponsesBody
from ..responses.store import Kept
from ..service import Service
from ..streaming import CLIENT_CLOSED_REQUEST, respond

router = APIRouter()


@router.post("/v1/responses", response_model=None)
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answer an input, alone or as the continuation of a response."""
    service: Service = request.app.state.service
    previous = body.previous_response_id
    earlier = [] if previous is None else kept(service, previous, "previous_response_id", 400).messages
    messages = body.new_messages()
    chat = body.chat(earlier, messages)
    begun = await begin(service, request, chat)
    if begun is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    def keep(response: dict[str, Any], message: dict[str, Any]) -> None:
        if body.store is not False:
            service.responses.add(response, [*earlier, *messages, message])

    fields = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": previous,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "store": body.store is not False,
        "temperature": begun.params.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": begun.params.top_p,
        "truncation": "disabled",
    }
    answer = ResponsesAnswer(begun.name, service.token_texts, begun.reading, fields, keep)
    return await respond(request, begun.generation, answer, 1, bool(body.stream), False)


@router.get("/v1/responses/{id}", response_model=None)
async def retrieve(id: str, request: Request) -> Response:
    """Answer a response that was kept."""
    return json_response(kept(request.app.state.service, id, "id", 404).response)


@router.delete("/v1/responses/{id}", response_model=None)
async def delete(id: str, request: Request) -> Response:
    """Forget a response."""
    kept(request.app.state.service, id, "id", 404)
    request.app.state.service.responses.remove(id)
    return json_response({"id": id, "object": "response", "deleted": True})


def kept(service: Service, id: str, param: str, status: int) -> Kept:
    found = service.responses.get(id)
    if found is None:
        rule = "must be the id of a response that this server has kept (store: true, the latest 1024)"
        raise ApiError(status, f"{param} {rule}, got {shown(id)}", param)
    return found
