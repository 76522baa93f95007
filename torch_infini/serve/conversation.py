"""begin: starts the answer of a conversation, for every interface whose bodies become one of chat completions.

begin_prompt does so for one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.requests import Request

from ..engine import SamplingParams
from .generation import Generation
from .reading import Reading
from .schemas import ChatBody, CompletionBody
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


class Defaults(NamedTuple):
    """Settings of a request that its body of completions does not have.

    Attributes:
        sampling: Fields of SamplingParams. Unlike one of the body, a max_tokens is lowered to what the context leaves.
        form_field: The field of the request that has the form of the text; None: the body's.
    """

    sampling: Mapping[str, Any] = {}
    form_field: str | None = None


NO_DEFAULTS = Defaults()


async def begin(service: Service, request: Request, body: ChatBody, defaults: Defaults = NO_DEFAULTS) -> Begun | None:
    """Start an answer.

    Args:
        service: Computes it.
        request: The client's; the answer is not begun if it has left.
        body: The conversation.
        defaults: Settings that the body does not have.

    Returns:
        The answer; None if the client has left.

    Raises:
        ApiError: For a body that cannot be served, a full queue, or a server that shuts down.
    """
    name, adapter = service.served(body.model)
    params = body.params({"max_tokens": None, **service.sampling, **defaults.sampling})
    service.admit(1, params, "messages")
    template = body.template_arguments()
    conversation = body.conversation()
    reading = service.reading(body.offered, body.parallel_tool_calls is not False)
    encoding = service.encode_chat(reading.history(conversation), template)
    prompt = await run_until_disconnect(request.receive, encoding)
    if prompt is None:
        return None
    field = defaults.form_field or body.form_field
    if reading.tools and not body.must_call:  # what is wrong with the form itself is not said of the tools
        await service.compile_form(params, field)
        field = "tools"
    reading, params = service.read_after(prompt, reading, params, body.tool_choice)
    await service.compile_form(params, "tools" if body.must_call else field)
    generation = service.start([prompt], params, "messages", body.token_limit, adapter)
    return Begun(generation, name, params, reading, prompt)


async def begin_prompt(
    service: Service, request: Request, body: CompletionBody, defaults: Defaults = NO_DEFAULTS
) -> Begun | None:
    """Start the continuation of the body's only prompt, a text, which may fill the context; otherwise as begin."""
    name, adapter = service.served(body.model)
    params = body.params({"max_tokens": None, **service.sampling, **defaults.sampling})
    service.admit(1, params, "prompt")
    prompt = await run_until_disconnect(request.receive, service.encode(body.prompt[0], "prompt"))
    if prompt is None:
        return None
    await service.compile_form(params, defaults.form_field or body.form_field)
    generation = service.start([prompt], params, "prompt", body.token_limit, adapter)
    return Begun(generation, name, params, Reading(), prompt)
