"""The bodies of requests, as pydantic models. Types are strict: "1" is not a number, and true is not an integer.

fields.py says what happens to fields that are not here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ..engine import SamplingParams
from .errors import ApiError, bad_request, shown
from .fields import Body, check_utf8, validator
from .structured import FORMS, GRAMMAR, SCHEMA, ResponseFormat, StructuredOutputs, form_of
from .tool_schemas import Calls, Tool, ToolChoice, ToolList, check_choice, check_tools

MAX_STOPS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, MAX_SAMPLES = 64, 1024, 20, 128
LARGEST = 2**63 - 1

# Arguments of apply_chat_template itself, which are not variables of the template.
RESERVED = frozenset(
    {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length"}
    | {"messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"}
    | {"tokenizer_kwargs", "tools", "truncation"}
)

Message = dict[str, Any]
IMAGE = "image_url"  # the type of a part that is an image


def is_integer(value: Any) -> bool:
    return type(value) is int


def prompts_of(value: Any) -> list[str | list[int]]:
    """Return the prompts of /v1/completions as a list; empty for null."""
    if value is None:
        return []
    if isinstance(value, str):
        return [check_utf8(value)]
    if not isinstance(value, list) or not value:
        raise TypeError
    if all(map(is_integer, value)):
        return [value]
    if all(isinstance(one, str) for one in value):
        return [check_utf8(one) for one in value]
    if all(isinstance(one, list) and all(map(is_integer, one)) for one in value):
        return list(value)
    raise TypeError


def stops_of(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise TypeError
    if len(stops) > MAX_STOPS:
        raise ValueError(f"must have at most {MAX_STOPS} strings")
    return tuple(stops)


def bias_of(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    bias = {}
    for token, number in value.items() if isinstance(value, dict) else [("", 0)]:
        if not (token.isascii() and token.isdigit() and len(token) < 19) or type(number) not in (int, float):
            raise TypeError
        if not -100 <= number <= 100:
            raise TypeError
        bias[int(token)] = float(number)
    return bias


def content_of(value: Any) -> str | list[Message] | None:
    """Return a message's content: with images its parts, else a string, text parts joined by newlines; null is None."""
    if value is None or isinstance(value, str):
        return value and check_utf8(value)
    if not isinstance(value, list) or not value:
        raise TypeError
    parts = [part_of(part) for part in value]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def part_of(part: Any) -> Message:
    """Return a part of a message's content, a text or an image, as the chat template's side takes it."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": check_utf8(part["text"])}
    if kind == IMAGE:
        image = part.get(IMAGE)
        url = image.get("url") if isinstance(image, dict) else image
        if not isinstance(url, str) or not url.startswith("data:image/"):
            rule = 'must have images as {"type": "image_url", "image_url": {"url": "data:image/...;base64,..."}}'
            raise ValueError(f"{rule}, because this server fetches none")
        return image_part(check_utf8(url))
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"must have only parts of type text and {IMAGE}, not {shown(kind)}")
    raise TypeError


def image_part(url: str) -> Message:
    """Return the part of a message that is the image of a data URL."""
    return {"type": IMAGE, IMAGE: {"url": url}}


def size_of(content: str | list[Message]) -> int:
    """Return the bytes of a content's texts."""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    return sum(len(text.encode()) for text in texts)


Prompts = Annotated[
    list[str | list[int]],
    validator(
        str | list[str] | list[int] | list[list[int]] | None,
        "must be a text, token ids, or a list of texts or of token ids, at least one",
        prompts_of,
    ),
]
Stops = Annotated[
    tuple[str, ...],
    validator(str | list[str] | None, "must be a string or a list of strings, none of them empty", stops_of),
]
Bias = Annotated[
    dict[int, float] | None,
    validator(dict[str, float] | None, "must map token ids, written as strings, to numbers from -100 to 100", bias_of),
]
Content = Annotated[
    str | list[Message] | None,
    validator(
        str | list[dict[str, Any]] | None,
        'must be a string, or a list of parts {"type": "text", "text": "..."}',
        content_of,
    ),
]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's


class ChatMessage(Body):
    """A message of a conversation. The fields that OpenAI's client adds to an assistant's message are accepted."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: Annotated[str, AfterValidator(check_utf8)] | None = None
    reasoning: Annotated[str, AfterValidator(check_utf8)] | None = None  # what newer servers call reasoning_content
    tool_calls: Calls = []
    tool_call_id: str | None = None

    def plain(self) -> Message:
        """Return the message for the chat template, with role system for developer."""
        more: Message = {
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": self.tool_calls,
            "tool_call_id": self.tool_call_id,
        }
        content = self.refusal or "" if self.content is None else self.content
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, **{name: value for name, value in more.items() if value}}

    def check(self, within: str) -> None:
        """Raise ApiError if content is missing (an assistant's may be) or a field belongs to another role."""
        if self.content is None and self.role != "assistant":
            raise ApiError(
                400, f"{within}content must be a text or a list of parts of text, got null", f"{within}content"
            )
        if isinstance(self.content, list) and self.role != "user":
            rule = "content must have images only where role is user, got some"
            raise ApiError(400, f"{within}{rule}", f"{within}content")
        assistants = ("refusal", "reasoning_content", "reasoning", "tool_calls")
        for name, role in (*((name, "assistant") for name in assistants), ("tool_call_id", "tool")):
            value = getattr(self, name)
            if value and self.role != role:
                refused = f"{within}{name} must be null where role is not {role}, got {shown(value)}"
                raise ApiError(400, refused, f"{within}{name}")
        if self.role == "tool" and not self.tool_call_id:
            raise ApiError(400, f"{within}tool_call_id must be that of a call, got none", f"{within}tool_call_id")


class SamplingBody(Body):
    """The fields that /v1/chat/completions and /v1/completions share."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    seed: int | None = Field(None, ge=-LARGEST - 1, le=LARGEST)
    stop: Stops = ()
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS)
    logit_bias: Bias = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def form_field(self) -> str:
        """The field that has the form of the text."""
        return GRAMMAR if self.grammar else SCHEMA if self.structured_outputs is None else FORMS

    @property
    def top(self) -> int | None:
        """How many likely tokens to return with each token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def prompt_top(self) -> int | None:
        """How many likely tokens to compute for each token of the prompt; None: no log-probabilities of it."""
        return None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The name and value of the field that limits the output."""
        return "max_tokens", self.max_tokens

    @property
    def zero_limit(self) -> int:
        """The max_tokens that replaces a limit of 0; SamplingParams rejects 0."""
        return 0

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Make SamplingParams, with defaults for missing fields; ApiError for a value that it rejects."""
        self.reject_unsupported()
        if self.stream_options is not None:
            self.stream_options.reject_unsupported("stream_options.")
            if not self.stream:
                refused = "stream_options must be null where stream is not true, got an object"
                raise ApiError(400, refused, "stream_options")
            if self.continuous_usage and not self.include_usage:
                name = "stream_options.continuous_usage_stats"
                raise ApiError(400, f"{name} must be null or false where include_usage is not true, got true", name)
        limit, most = self.token_limit
        given = {
            "max_tokens": most or (None if most is None else self.zero_limit),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # -1: no limit, for clients of vLLM
            "min_p": self.min_p,
            "n": self.n,
            "seed": self.seed,
            "stop": self.stop or None,
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "logprobs": self.top,
            "prompt_logprobs": self.prompt_top,
            "structured_outputs": form_of(self.response_format, self.structured_outputs, self.grammar),
        }
        try:
            return SamplingParams(**{**defaults, **{name: value for name, value in given.items() if value is not None}})
        except ValueError as error:
            names = {"max_tokens": limit, "logprobs": "top_logprobs"}
            raise bad_request(error, **names) from None


class ChatBody(SamplingBody):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ToolList = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def top(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "logprobs must be true where top_logprobs is given, got another", "logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().token_limit
        if self.max_tokens not in (None, self.max_completion_tokens):
            other = f"max_completion_tokens, {self.max_completion_tokens}, or null"
            raise ApiError(400, f"max_tokens must be {other}, got {self.max_tokens}", "max_tokens")
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    def reject_unsupported(self, within: str = "") -> None:
        super().reject_unsupported(within)
        check_tools(self.tools or [])
        check_choice(self.tool_choice, self.tools or [])
        # response_format is the form of a text, and an answer that must be calls has none.
        if self.must_call and (self.structured_outputs is not None or self.grammar):
            rule = "tool_choice must be none or auto where the answer has a form, got another"
            raise ApiError(400, rule, "tool_choice")

    @property
    def must_call(self) -> bool:
        """Whether the answer must have a call."""
        return self.tool_choice not in ("none", "auto")

    def template_arguments(self) -> dict[str, Any]:
        """Return the chat template's variables besides the messages; ApiError for a reserved name."""
        given = dict(self.chat_template_kwargs or {})
        for name in given.keys() & RESERVED:
            param = f"chat_template_kwargs.{name}"
            rule = f"{param} must be a variable of the chat template, got an argument of apply_chat_template"
            raise ApiError(400, rule, param)
        try:
            check_utf8(json.dumps(given, ensure_ascii=False))
        except ValueError as error:
            raise ApiError(400, f"chat_template_kwargs {error}", "chat_template_kwargs") from None
        if self.offered:
            given["tools"] = [tool.plain() for tool in self.offered]
        if self.add_generation_prompt is not None:
            given["add_generation_prompt"] = self.add_generation_prompt
        if self.continue_final_message:
            self._check_continued()
            given |= {"continue_final_message": True, "add_generation_prompt": False}
        return given if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort, **given}

    def _check_continued(self) -> None:
        """Raise ApiError if the last message cannot be continued."""
        last = self.messages[-1]
        if last.role != "assistant" or not last.content or last.tool_calls:
            rule = "must be false where the last message is not a text of the assistant"
            raise ApiError(400, f"continue_final_message {rule}, got true", "continue_final_message")
        if self.add_generation_prompt:
            rule = "must be false where continue_final_message is true, got true"
            raise ApiError(400, f"add_generation_prompt {rule}", "add_generation_prompt")

    def conversation(self) -> list[Message]:
        """Return the messages for the chat template."""
        for at, message in enumerate(self.messages):
            message.reject_unsupported(f"messages[{at}].")
            message.check(f"messages[{at}].")
        return [message.plain() for message in self.messages]


class CompletionBody(SamplingBody):
    """The body of /v1/completions."""

    prompt: Prompts
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompt_top(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((one for one in wanted if one is not None), default=None)

    @property
    def zero_limit(self) -> int:
        return 1  # the route leaves the token out


class TokenizeBody(Body):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: Annotated[str, AfterValidator(check_utf8)] | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    tools: ToolList = None
    add_special_tokens: bool | None = None


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]
