"""POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...engine import LoRARequest, RequestOutput, SamplingParams
from ..answers import CompletionAnswer
from ..schemas import CompletionBody
from ..service import Service
from ..streaming import CLIENT_CLOSED_REQUEST, respond, respond_finished, run_until_disconnect, without_tokens

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
    stream = bool(body.stream)
    if body.max_tokens == 0:  # valid in OpenAI's API
        outputs = await run_until_disconnect(request.receive, read_prompts(service, prompts, params, adapter))
        if outputs is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        answer = await answer_to(given, body, service, name, params.n)
        return respond_finished(without_tokens(outputs, params), params.n, answer, stream, body.include_usage)
    await service.compile_form(params, body.form_field)
    answer = await answer_to(given, body, service, name, params.n)
    generation = service.start(prompts, params, "prompt", body.token_limit, adapter)
    return await respond(request, generation, answer, params.n, stream, body.include_usage)


async def answer_to(
    prompts: list[str | list[int]], body: CompletionBody, service: Service, name: str, samples: int
) -> CompletionAnswer:
    """Return the answer to prompts, of which it repeats the texts if the body's `echo` is true."""
    texts = [await service.decode(prompt) for prompt in prompts] if body.echo else []
    echo = [text for text in texts for _ in range(samples)]
    wants = body.prompt_logprobs is not None
    answer = CompletionAnswer(name, service.token_texts, service.fingerprint, echo, wants)
    answer.continuous_usage = body.continuous_usage
    return answer


async def read_prompts(
    service: Service, prompts: list[list[int]], params: SamplingParams, adapter: LoRARequest | None
) -> list[RequestOutput]:
    """Return the outputs of prompts to which nothing is generated; computed only if their logprobs are requested."""
    if params.prompt_logprobs is None:
        return [RequestOutput("", None, prompt, []) for prompt in prompts]
    once = replace(params, n=1, structured_outputs=None)  # the engine generates at least a token
    generation = service.start(prompts, once, "prompt", ("max_tokens", 0), adapter)
    try:
        return await generation.finish()
    finally:
        generation.close()
