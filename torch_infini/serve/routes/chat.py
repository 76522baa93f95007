"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..answers import ChatAnswer
from ..schemas import ChatBody
from ..service import Service
from ..streaming import CLIENT_CLOSED_REQUEST, respond, run_until_disconnect

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    name, adapter = service.served(body.model)
    params = body.params({"max_tokens": None, **service.sampling})
    service.admit(1, params, "messages")
    template = body.template_arguments()
    conversation = body.conversation()
    reading = service.reading(body.offered, body.parallel_tool_calls is not False)
    encoding = service.encode_chat(reading.history(conversation), template)
    prompt = await run_until_disconnect(request.receive, encoding)
    if prompt is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    reading, params = service.read_after(prompt, reading, params, body.tool_choice)
    await service.compile_form(params, "tools" if body.must_call else body.form_field)
    generation = service.start([prompt], params, "messages", body.token_limit, adapter)
    answer = ChatAnswer(name, service.token_texts, service.fingerprint, reading)
    return await respond(request, generation, answer, params.n, bool(body.stream), body.include_usage)
