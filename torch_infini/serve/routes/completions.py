"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..answers import CompletionAnswer
from ..schemas import CompletionBody
from ..service import Service
from ..streaming import CLIENT_CLOSED_REQUEST, respond, unless_gone

router = APIRouter()


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue prompts: texts or token ids."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    params = body.params(service.sampling)
    service.admit(len(body.prompt), params, "prompt")
    prompts = await unless_gone(request.receive, service.encode_all(body.prompt, "prompt"))
    if prompts is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    generation = service.start(prompts, params, "prompt", body.most_tokens)
    answer = CompletionAnswer(service.model, service.token_texts)
    return await respond(request, generation, answer, params.n, bool(body.stream), body.include_usage)
