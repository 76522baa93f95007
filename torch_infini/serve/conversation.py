"""begin: starts the answer of a conversation, for every interface whose bodies become one of chat completions."""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request

from ..engine import SamplingParams
from .generation import Generation
from .reading import Reading
from .schemas import ChatBody
from .service import Service
from .streaming import run_until_disconnect


class Begun(NamedTuple):
    """An answer that the engine computes.

    Attributes:
        generation: Computes it; the caller closes it.
        name: The model's name in the answer.
        params: The request's settings.
        reading: How its text is read.
        prompt: The prompt's tokens.
    """

    generation: Generation
    name: str
    params: SamplingParams
    reading: Reading
    prompt: list[int]


async def begin(service: Service, request: Request, body: ChatBody) -> Begun | None:
    """Start an answer.

    Returns:
        The answer; None if the client has left.

    Raises:
        ApiError: For a body that cannot be served, a full queue, or a server that shuts down.
    """
    name, adapter = service.served(body.model)
    params = body.params({"max_tokens": None, **service.sampling})
    service.admit(1, params, "messages")
    template = body.template_arguments()
    conversation = body.conversation()
    reading = service.reading(body.offered, body.parallel_tool_calls is not False)
    encoding = service.encode_chat(reading.history(conversation), template)
    prompt = await run_until_disconnect(request.receive, encoding)
    if prompt is None:
        return None
    reading, params = service.read_after(prompt, reading, params, body.tool_choice)
    await service.compile_form(params, "tools" if body.must_call else body.form_field)
    generation = service.start([prompt], params, "messages", body.token_limit, adapter)
    return Begun(generation, name, params, reading, prompt)
