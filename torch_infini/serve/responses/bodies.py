"""The body of /v1/responses, and what it is as a body of /v1/chat/completions, which checks and answers it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from ..encoding import to_json
from ..errors import ApiError, invalid, shown
from ..fields import Body, check_utf8
from ..schemas import ChatBody, image_part
from ..tool_schemas import MAX_TOOLS

Text = Annotated[str, AfterValidator(check_utf8)]
Item = dict[str, Any]

# Fields that are accepted besides those below: they have no effect, or must have one of these values.
WITHOUT_EFFECT = {
    "include",  # of what this server does not have, or always gives
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "stream_options",
    "user",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {"background": (False,), "top_logprobs": (0,), "truncation": ("disabled",)}
TEXTS = ("input_text", "output_text", "text")
IMAGE = "input_image"
LARGEST_INPUT = 4096  # items
SAMPLING = ("top_k", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos")
REPEATED = ("tools", "tool_choice", "text", "reasoning")  # objects of the body that the answer has as they came


class ResponsesBody(Body):
    """The body of /v1/responses."""

    model: str | None = None
    input: Text | list[Item]
    instructions: Text | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    tools: list[Item] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Item | None = None
    text: Item | None = None
    metadata: dict[Text, Text] | None = None
    max_tool_calls: int | None = None  # of tools that OpenAI's servers run: there are none
    chat_template_kwargs: dict[str, Any] | None = None
    # vLLM's, of which load generators use some:
    top_k: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None

    def reject_unsupported(self, within: str = "") -> None:
        """Raise ApiError for an unknown field, and for an unsupported one unless its value is neutral."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in WITHOUT_EFFECT or value in NEUTRAL.get(name, ()):
                continue
            if name in NEUTRAL:
                allowed = " or ".join(map(repr, NEUTRAL[name]))
                raise ApiError(400, f"{name} must be {allowed} (more is not supported), got {shown(value)}", name)
            param = shown(name)[1:-1]
            raise ApiError(400, f"{param} must be a field of this request, got an unknown one", param)

    def new_messages(self) -> list[Item]:
        """Return the messages of `input`, in the form of chat completions."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not self.input or len(self.input) > LARGEST_INPUT:
            rule = f"input must be a text, or from 1 to {LARGEST_INPUT} items"
            raise ApiError(400, f"{rule}, got {len(self.input)}", "input")
        return list(joined(self._messages(self.input)))

    def chat(self, earlier: Sequence[Item], messages: Sequence[Item]) -> ChatBody:
        """Return the same request as a body of chat completions; ApiError for what it cannot have.

        Args:
            earlier: The messages of the response that this one continues.
            messages: Those of new_messages.
        """
        self.reject_unsupported()
        for name in REPEATED:
            try:
                to_json(getattr(self, name))
            except ValueError:  # from a body like {"tools": [{"x": NaN}]}, which Python's parser takes
                rule = f"{name} must have finite numbers, and text that UTF-8 can encode, got others"
                raise ApiError(400, rule, name) from None
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": list(joined([*system, *earlier, *messages])),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            **{name: getattr(self, name) for name in SAMPLING},
            "stream": self.stream,
            "parallel_tool_calls": self.parallel_tool_calls,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self._effort(),
            "response_format": self._response_format(),
            "tools": [self._tool(tool, f"tools[{at}]") for at, tool in enumerate(self.tools or [])] or None,
        }
        if self.tool_choice is not None:
            fields["tool_choice"] = self._choice(self.tool_choice)
        try:
            return ChatBody.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise invalid(dict(error.errors()[0])) from None

    def _messages(self, items: Sequence[Item]) -> Iterator[Item]:
        for at, item in enumerate(items):
            within = f"input[{at}]"
            kind = item.get("type", "message")
            if kind == "message":
                role, content = item.get("role"), item.get("content")
                yield {"role": role, "content": parts_of(content, f"{within}.content", sees=role == "user")}
            elif kind == "function_call":
                for name in ("call_id", "name", "arguments"):
                    require_text(item, name, within)
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                yield {"role": "assistant", "content": None, "tool_calls": [call]}
            elif kind == "function_call_output":
                require_text(item, "call_id", within)
                output = parts_of(item.get("output"), f"{within}.output")
                yield {"role": "tool", "tool_call_id": item["call_id"], "content": output}
            elif kind == "reasoning":
                parts = item.get("content") or item.get("summary") or []
                texts = [part.get("text") for part in parts if isinstance(part, dict)]
                if not all(isinstance(text, str) for text in texts):
                    raise ApiError(400, f"{within}.content must have texts, got others", f"{within}.content")
                if texts:
                    yield {"role": "assistant", "content": None, "reasoning_content": "\n".join(map(str, texts))}
            else:
                rule = "must be message, function_call, function_call_output or reasoning"
                raise ApiError(400, f"{within}.type {rule}, got {shown(kind)}", f"{within}.type")

    def _tool(self, tool: Item, param: str) -> Item:
        if tool.get("type") != "function":
            rule = "must be function: there are no tools that this server runs"
            raise ApiError(400, f"{param}.type {rule}, got {shown(tool.get('type'))}", f"{param}.type")
        return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}

    def _choice(self, choice: str | Item) -> str | Item:
        if isinstance(choice, dict) and choice.get("type") == "function" and set(choice) == {"type", "name"}:
            return {"type": "function", "function": {"name": choice["name"]}}
        return choice

    def _effort(self) -> object:
        """Return reasoning.effort; a summary of the reasoning is the reasoning."""
        extra = set(self.reasoning or {}) - {"effort", "summary", "generate_summary"}
        if extra:
            param = f"reasoning.{min(extra)}"
            raise ApiError(400, f"{param} must be a field of this request, got an unknown one", param)
        return (self.reasoning or {}).get("effort")

    def _response_format(self) -> Item | None:
        """Return the form of the text that text.format asks for."""
        extra = set(self.text or {}) - {"format", "verbosity"}
        form = (self.text or {}).get("format")
        if extra or not (form is None or isinstance(form, dict)):
            raise ApiError(400, f"text must have format, an object, or verbosity, got {shown(self.text)}", "text")
        if form is None or form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def require_text(item: Item, name: str, within: str) -> None:
    if not isinstance(item.get(name), str):
        raise ApiError(400, f"{within}.{name} must be a text, got {shown(item.get(name))}", f"{within}.{name}")


def parts_of(content: object, param: str, sees: bool = False) -> str | list[Item]:
    """Return a content: its text, a string or parts of text; with images (sees) its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ApiError(400, f"{param} must be a text or a list of parts, got {shown(content)}", param)
    found: list[Item] = []
    for at, part in enumerate(content):
        kind = part.get("type")
        if kind == "refusal":
            part = {"type": "text", "text": part.get("refusal")}
        elif kind == IMAGE and sees:
            require_text(part, "image_url", f"{param}[{at}]")
            found.append(image_part(part["image_url"]))
            continue
        elif kind not in TEXTS:
            kinds = " or ".join((*TEXTS, *[IMAGE] * sees))
            raise ApiError(400, f"{param}[{at}].type must be {kinds}, got {shown(kind)}", f"{param}[{at}].type")
        require_text(part, "text", f"{param}[{at}]")
        found.append({"type": "text", "text": part["text"]})
    if any(part["type"] != "text" for part in found):
        return found
    return "\n".join(part["text"] for part in found)


def joined(messages: Iterable[Item]) -> Iterator[Item]:
    """Yield messages; an assistant's reasoning, text and calls, which are items of their own here, are one message."""
    last: Item | None = None
    for message in messages:
        if last is not None and is_continued(last, message):
            calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
            last |= {name: message[name] for name in ("content", "reasoning_content") if message.get(name)}
            last |= {"tool_calls": calls} if calls else {}
            continue
        if last is not None:
            yield last
        last = dict(message)
    if last is not None:
        yield last


def is_continued(last: Item, message: Item) -> bool:
    """Return whether an item goes on with the assistant's message before it."""
    both = last["role"] == "assistant" == message["role"]
    return both and not any(last.get(name) and message.get(name) for name in ("content", "reasoning_content"))
