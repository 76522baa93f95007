"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..answers import CompletionAnswer
from ..schemas import CompletionBody
from ..service import Service
from ..streaming import CLIENT_CLOSED_REQUEST, respond, respond_empty, run_until_disconnect

router = APIRouter()


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue prompts: texts or token ids."""
    service: Service = request.app.state.service
    name, adapter = service.served(body.model)
    params = body.params(service.sampling)
    given = body.prompt or [service.default_prompt()]
    service.admit(len(given), params, "prompt")
    prompts = await run_until_disconnect(request.receive, service.encode_all(given, "prompt"))
    if prompts is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if body.max_tokens == 0:  # valid in OpenAI's API; there is nothing to compute
        answer = CompletionAnswer(name, service.token_texts, service.fingerprint)
        return respond_empty(prompts, params, answer, bool(body.stream), body.include_usage)
    await service.compile_form(params, body.form_field)
    generation = service.start(prompts, params, "prompt", body.token_limit, adapter)
    answer = CompletionAnswer(name, service.token_texts, service.fingerprint)
    return await respond(request, generation, answer, params.n, bool(body.stream), body.include_usage)
