"""POST /tokenize and /detokenize, in the forms of vLLM's server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..encoding import json_response
from ..errors import ApiError
from ..schemas import DetokenizeBody, TokenizeBody
from ..service import Service, bytes_in
from ..tool_schemas import check_tools

router = APIRouter()


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Answer the tokens of a prompt or a conversation, as the model gets them."""
    service: Service = request.app.state.service
    service.served(body.model)
    body.reject_unsupported()
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt or messages must be given, one of them, got both or none", "prompt")
    if body.messages is not None:
        for at, message in enumerate(body.messages):
            message.check(f"messages[{at}].")
        tools = body.tools or []
        check_tools(tools)
        messages = service.reading(tools).history([message.plain() for message in body.messages])
        template = {"tools": [tool.plain() for tool in tools]} if tools else None
        tokens = await service.encode_chat(messages, template, bounded=False)
    elif body.add_special_tokens is False:
        text = body.prompt or ""
        tokens = await service.in_tokenizer(encode_plain, tokenizer_of(service), text, size=bytes_in(text))
    else:
        assert body.prompt is not None
        tokens = await service.encode(body.prompt, "prompt", bounded=False)
    return json_response({"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens})


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Answer the text of tokens, including special ones."""
    service: Service = request.app.state.service
    service.served(body.model)
    body.reject_unsupported()
    size = service.llm.engine.model.config.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise ApiError(400, f"tokens must be token ids from 0 to {size - 1}, got {token}", "tokens")
    text = await service.in_tokenizer(tokenizer_of(service).decode, body.tokens)
    return json_response({"prompt": text})


def tokenizer_of(service: Service) -> Any:
    tokenizer = service.llm.engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "the model's folder must have a tokenizer, got one without")
    return tokenizer


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # tokenizers raise exceptions of any type
        raise ApiError(400, f"prompt must be a text for the tokenizer, got {type(error).__name__}", "prompt") from None
