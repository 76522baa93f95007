"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..anthropic import CountBody, MessagesAnswer, MessagesBody
from ..conversation import Defaults, begin
from ..encoding import json_response
from ..service import Service
from ..streaming import CLIENT_CLOSED_REQUEST, respond

router = APIRouter()


@router.post("/v1/messages", response_model=None)
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    # Coding agents send one limit for every model: it may exceed the context.
    begun = await begin(service, request, body.chat(), Defaults({"max_tokens": body.max_tokens}))
    if begun is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    answer = MessagesAnswer(begun.name, service.token_texts, begun.reading, len(begun.prompt))
    return await respond(request, begun.generation, answer, 1, bool(body.stream), False)


@router.post("/v1/messages/count_tokens", response_model=None)
async def count_tokens(body: CountBody, request: Request) -> Response:
    """Answer the number of tokens of a conversation."""
    service: Service = request.app.state.service
    chat = body.chat()
    service.served(chat.model)
    chat.reject_unsupported()
    template, conversation = chat.template_arguments(), chat.conversation()
    messages = service.reading(chat.offered).history(conversation)
    tokens = await service.encode_chat(messages, template, bounded=False)
    return json_response({"input_tokens": len(tokens)})
