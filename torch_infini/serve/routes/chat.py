"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..answers import ChatAnswer
from ..conversation import begin
from ..schemas import ChatBody
from ..service import Service
from ..streaming import CLIENT_CLOSED_REQUEST, respond

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    begun = await begin(service, request, body)
    if begun is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    answer = ChatAnswer(begun.name, service.token_texts, service.fingerprint, begun.reading)
    answer.continuous_usage = body.continuous_usage
    return await respond(request, begun.generation, answer, begun.params.n, bool(body.stream), body.include_usage)
