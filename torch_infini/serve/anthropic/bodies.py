"""The bodies of /v1/messages, and what they are as bodies of /v1/chat/completions, which check and answer them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from ..errors import ApiError, invalid, shown
from ..fields import Body, check_utf8
from ..schemas import ChatBody, image_part
from ..tool_schemas import MAX_TOOLS

# Fields without effect on the answer: hints for caches and accounting.
WITHOUT_EFFECT = {"cache_control", "context_management", "inference_geo", "metadata", "service_tier"}

Text = Annotated[str, AfterValidator(check_utf8)]
Block = dict[str, Any]


class MessageBody(Body):
    """A body, or an object within a body, of Anthropic's interface."""

    def reject_unsupported(self, within: str = "") -> None:
        """Raise ApiError for an unknown field."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in WITHOUT_EFFECT:
                param = within + shown(name)[1:-1]
                raise ApiError(400, f"{param} must be a field that this server knows, got another", param)


class AnthropicMessage(MessageBody):
    """A message: a text, or blocks of content."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]


class AnthropicTool(MessageBody):
    """A tool that the client runs."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they are written


class AnthropicChoice(MessageBody):
    """Which tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(MessageBody):
    """Whether the model reasons before its answer; its template decides how much."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class CountBody(MessageBody):
    """The body of /v1/messages/count_tokens, and the fields of /v1/messages that make the prompt."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: Text | list[Block] | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnthropicChoice | None = None
    thinking: AnthropicThinking | None = None
    thread: Block | None = None

    def chat(self, **more: Any) -> ChatBody:
        """Return the same request as a body of chat completions; ApiError for what it cannot have.

        Args:
            **more: Other fields of that body.
        """
        self.reject_unsupported()
        if self.thread is not None:
            # The client's runner of tools asks for it, and sends all messages again where it gets these details.
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            rule = "thread must be null, because this server keeps no conversations, got another"
            raise ApiError(400, rule, "thread", details=details)
        fields: dict[str, Any] = {"model": self.model, "messages": list(self._messages()), **more}
        if self.tools:
            fields["tools"] = [self._tool(tool, f"tools[{at}].") for at, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            self.tool_choice.reject_unsupported("tool_choice.")
            if (self.tool_choice.type == "tool") != (self.tool_choice.name is not None):
                rule = "tool_choice.name must be given where type is tool, and only there"
                raise ApiError(400, f"{rule}, got {shown(self.tool_choice.name)}", "tool_choice.name")
            named = {"type": "function", "function": {"name": self.tool_choice.name}}
            choices = {"auto": "auto", "none": "none", "any": "required", "tool": named}
            fields["tool_choice"] = choices[self.tool_choice.type]
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.thinking is not None:
            self.thinking.reject_unsupported("thinking.")
            if self.thinking.type != "adaptive":
                fields["chat_template_kwargs"] = {"enable_thinking": self.thinking.type == "enabled"}
        last = fields["messages"][-1]
        if last["role"] == "assistant" and last["content"] and not last.get("tool_calls"):
            fields["continue_final_message"] = True
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            raise invalid(dict(error.errors()[0])) from None

    def _messages(self) -> Iterator[Block]:
        if self.system is not None:
            yield {"role": "system", "content": texts_of(self.system, "system")}
        for at, message in enumerate(self.messages):
            within = f"messages[{at}]."
            message.reject_unsupported(within)
            if isinstance(message.content, str):
                yield {"role": message.role, "content": message.content}
            elif message.role == "assistant":
                yield assistant_message(message.content, f"{within}content")
            else:
                yield from user_messages(message.role, message.content, f"{within}content")

    def _tool(self, tool: AnthropicTool, within: str) -> Block:
        tool.reject_unsupported(within)
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        return {"type": "function", "function": function}


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    output_config: Block | None = None

    def chat(self, **more: Any) -> ChatBody:
        """Return the same request as a body of chat completions, without max_tokens; errors as CountBody.chat."""
        sampling = {
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "response_format": self._response_format(),
        }
        return super().chat(**{name: value for name, value in sampling.items() if value is not None}, **more)

    def _response_format(self) -> Block | None:
        """Return the form of the text that output_config asks for."""
        config = dict(self.output_config or {})
        form = config.pop("format", None)
        config.pop("effort", None)  # how much to think, which the template's model decides
        if config or not (form is None or (isinstance(form, dict) and form.get("type") == "json_schema")):
            rule = 'output_config must have effort, or format {"type": "json_schema", "schema": ...}'
            raise ApiError(400, f"{rule}, got {shown(self.output_config)}", "output_config")
        if form is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema")}}


def block_of(block: Block, kinds: dict[str, tuple[str, ...]], param: str) -> str:
    """Return the type of a block, one of `kinds`, after checking that it has texts or objects of these names."""
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise ApiError(400, f"{param}.type must be {' or '.join(kinds)} here, got {shown(kind)}", f"{param}.type")
    for name in kinds[kind]:
        wanted = dict if name in ("input", "source") else str
        if not isinstance(block.get(name), wanted):
            rule = f"be {'an object' if wanted is dict else 'a text'}"
            raise ApiError(400, f"{param}.{name} must {rule}, got {shown(block.get(name))}", f"{param}.{name}")
    return kind


def texts_of(content: str | list[Block], param: str) -> str:
    """Return blocks of text as one text."""
    if isinstance(content, str):
        return content
    for at, block in enumerate(content):
        block_of(block, TEXT, f"{param}[{at}]")
    return "\n".join(block["text"] for block in content)


ASSISTANT = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "thinking": ("thinking",),
    "redacted_thinking": (),
}
USER: dict[str, tuple[str, ...]] = {"text": ("text",), "tool_result": ("tool_use_id",), "image": ("source",)}
TEXT: dict[str, tuple[str, ...]] = {"text": ("text",)}


def assistant_message(content: list[Block], param: str) -> Block:
    """Return an assistant's message of chat completions; reasoning that was encrypted elsewhere is left out."""
    kinds = [block_of(block, ASSISTANT, f"{param}[{at}]") for at, block in enumerate(content)]
    blocks = list(zip(kinds, content, strict=True))
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
        }
        for kind, block in blocks
        if kind == "tool_use"
    ]
    return {
        "role": "assistant",
        "content": "\n".join(block["text"] for kind, block in blocks if kind == "text"),
        "reasoning_content": "\n".join(block["thinking"] for kind, block in blocks if kind == "thinking") or None,
        "tool_calls": calls,
    }


def user_messages(role: str, content: list[Block], param: str) -> Iterator[Block]:
    """Yield the results of tools, messages of their own in chat completions, and the text with its images."""
    parts: list[Block] = []
    for at, block in enumerate(content):
        within = f"{param}[{at}]"
        kind = block_of(block, USER if role == "user" else TEXT, within)
        if kind != "tool_result":
            parts.append(block if kind == "text" else image_of(block["source"], f"{within}.source"))
            continue
        result = block.get("content") or ""
        if not isinstance(result, str) and not (
            isinstance(result, list) and all(isinstance(one, dict) for one in result)
        ):
            raise ApiError(400, f"{within}.content must be a text or blocks, got {shown(result)}", f"{within}.content")
        text = texts_of(result, f"{within}.content")
        shown_text = f"Error: {text}" if block.get("is_error") is True else text
        yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": shown_text}
    if all(part["type"] == "text" for part in parts):
        if parts or not content:
            yield {"role": role, "content": "\n".join(part["text"] for part in parts)}
    else:
        yield {
            "role": role,
            "content": [{"type": "text", "text": p["text"]} if p["type"] == "text" else p for p in parts],
        }


def image_of(source: Block, param: str) -> Block:
    """Return the source of an image as a part of chat completions."""
    if source.get("type") != "base64":
        rule = 'must be {"type": "base64", "media_type": "image/...", "data": ...}, because this server fetches none'
        raise ApiError(400, f"{param} {rule}, got {shown(source.get('type'))}", f"{param}.type")
    for name in ("media_type", "data"):
        if not isinstance(source.get(name), str):
            raise ApiError(400, f"{param}.{name} must be a text, got {shown(source.get(name))}", f"{param}.{name}")
    return image_part(f"data:{source['media_type']};base64,{source['data']}")
