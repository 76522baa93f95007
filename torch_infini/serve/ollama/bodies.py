"""The bodies of Ollama's routes, and what they are as bodies of completions, which check and answer them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from ...engine import PoolingParams, StructuredOutputsParams
from ..conversation import Defaults
from ..embeddings import MAX_INPUTS
from ..errors import ApiError, bad_request, invalid, shown
from ..fields import Body, check_utf8, validator
from ..schemas import LARGEST, ChatBody, CompletionBody, Message, SamplingBody, Stops, image_part
from ..service import Service
from ..structured import invalid_form

# Options of Ollama's runner: how it loads and computes a model, which this server's command decides.
RUNNER = {"f16_kv", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_thread", "numa"}
RUNNER |= {"use_mlock", "use_mmap"}
# Settings of samplers that must be off, and the penalties' range, which is all tokens here.
SAMPLERS = {"mirostat_eta", "mirostat_tau", "num_keep", "repeat_last_n"}
LEVELS = ("low", "medium", "high")
# Fields of SamplingBody by names of options, where these differ.
RENAMED = {"repeat_penalty": "repetition_penalty"}

Text = Annotated[str, AfterValidator(check_utf8)]
Completion = TypeVar("Completion", bound=SamplingBody)


def think_of(value: Any) -> bool | str | None:
    if value is not None and not isinstance(value, bool) and value not in LEVELS:
        raise TypeError
    return value


def format_of(value: Any) -> str | dict[str, Any] | None:
    if not (value in (None, "", "json") or isinstance(value, dict)):
        raise TypeError
    return None if value == "" else value


def limit_of(value: Any) -> int | None:
    if value is not None and not (type(value) is int and (value in (-1, -2) or 1 <= value <= LARGEST)):
        raise TypeError
    return value


Think = Annotated[bool | str | None, validator(bool | str | None, "must be true, false, low, medium or high", think_of)]
Format = Annotated[
    str | dict[str, Any] | None, validator(str | dict[str, Any] | None, 'must be "json" or a JSON schema', format_of)
]
Limit = Annotated[
    int | None,
    validator(int | None, "must be an integer of at least 1, or -1 or -2 (what the context leaves)", limit_of),
]


class OllamaBody(Body):
    """A body, or an object within a body, of Ollama's interface."""

    without_effect: ClassVar[Collection[str]] = ()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class OllamaOptions(OllamaBody):
    """The settings of a request."""

    without_effect = RUNNER | SAMPLERS
    neutral = {"mirostat": (0,), "penalize_newline": (True,), "tfs_z": (1, 1.0), "typical_p": (1, 1.0)}

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=LARGEST)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-LARGEST - 1, le=LARGEST)
    stop: Stops = ()
    repeat_penalty: float | None = Field(None, gt=0, le=3e38)  # it is a float32
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    num_predict: Limit = None

    def sampling(self) -> dict[str, Any]:
        """Return the fields of SamplingBody that are given."""
        given = self.model_dump(include=set(type(self).model_fields) - {"num_predict", "stop"}, exclude_none=True)
        if self.seed == -1:  # Ollama's default, a random one
            del given["seed"]
        stop = {"stop": list(self.stop)} if self.stop else {}
        return {**{RENAMED.get(name, name): value for name, value in given.items()}, **stop}


class OllamaRequest(OllamaBody):
    """What the bodies of /api/chat and /api/generate share."""

    without_effect = ("keep_alive",)
    neutral = {"logprobs": (False,), "top_logprobs": (0,), "truncate": (False,), "shift": (False,)}

    model: str
    think: Think = None
    format: Format = None
    options: OllamaOptions | None = None
    stream: bool | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed, which is the default."""
        return self.stream is not False

    def reject_unsupported(self, within: str = "") -> None:
        super().reject_unsupported(within)
        if self.options is not None:
            self.options.reject_unsupported("options.")

    def defaults(self) -> Defaults:
        """Return the settings that bodies of completions do not have; ApiError for a format that is no schema."""
        sampling: dict[str, Any] = {}
        limit = None if self.options is None else self.options.num_predict
        if limit is not None:
            sampling["max_tokens"] = limit if limit > 0 else None
        if self.format is not None:
            form: dict[str, Any] = {"json_object": True} if self.format == "json" else {"json": self.format}
            try:
                sampling["structured_outputs"] = StructuredOutputsParams(**form)
            except ValueError as error:
                raise invalid_form(error, "format") from None
        return Defaults(sampling, "format")

    def completion(self, kind: type[Completion], model: str, fields: dict[str, Any]) -> Completion:
        """Return the same request as a body of completions; ApiError for what it cannot have.

        Args:
            kind: The body.
            model: The model's name on this server.
            fields: Fields of that body besides the settings.
        """
        self.reject_unsupported()
        settings = {} if self.options is None else self.options.sampling()
        try:
            return kind.model_validate({"model": model, **settings, **fields})
        except ValidationError as error:
            raise invalid(dict(error.errors()[0])) from None

    def thinking(self) -> dict[str, Any]:
        """Return the fields of ChatBody that say whether, and how much, the model reasons."""
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"chat_template_kwargs": {"enable_thinking": bool(self.think)}, **effort}


class OllamaFunction(OllamaBody):
    """What a call calls."""

    without_effect = ("index",)

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(OllamaBody):
    """A call of a tool in an assistant's message."""

    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(OllamaBody):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    images: list[Text] | None = None
    thinking: Text | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: Text | None = None
    tool_call_id: Text | None = None

    def check(self, within: str) -> None:
        """Raise ApiError for a field that is unknown, or belongs to another role."""
        self.reject_unsupported(within)
        for at, call in enumerate(self.tool_calls or ()):
            call.reject_unsupported(f"{within}tool_calls[{at}].")
            call.function.reject_unsupported(f"{within}tool_calls[{at}].function.")
        roles = {"thinking": "assistant", "tool_calls": "assistant", "tool_name": "tool", "tool_call_id": "tool"}
        roles["images"] = "user"
        for name, role in roles.items():
            value = getattr(self, name)
            if value and self.role != role:
                refused = f"{within}{name} must be null where role is not {role}, got {shown(value)}"
                raise ApiError(400, refused, f"{within}{name}")


class OllamaChatBody(OllamaRequest):
    """The body of /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None

    def chat(self, model: str) -> ChatBody:
        """Return the same request as a body of chat completions; ApiError for what it cannot have.

        Args:
            model: The model's name on this server.
        """
        fields = {"messages": list(plain_messages(self.messages or [])), **self.thinking()}
        if self.tools:
            fields["tools"] = [{"type": "function", **tool} for tool in self.tools]
        return self.completion(ChatBody, model, fields)


class OllamaGenerateBody(OllamaRequest):
    """The body of /api/generate."""

    neutral = {**OllamaRequest.neutral, "context": ([],), "suffix": ("",), "template": ("",)}

    prompt: Text | None = None
    images: list[Text] | None = None
    system: Text | None = None
    raw: bool | None = None

    def chat(self, model: str) -> ChatBody:
        """Return the same request, not raw, as a body of chat completions; ApiError for what it cannot have.

        Args:
            model: The model's name on this server.
        """
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": with_images(self.prompt, self.images)})
        return self.completion(ChatBody, model, {"messages": messages, **self.thinking()})

    def text(self, model: str) -> CompletionBody:
        """Return the same request, raw, as a body of text completions; ApiError for what it cannot have.

        Args:
            model: The model's name on this server.
        """
        for name in ("system", "think", "images"):
            if value := getattr(self, name):
                raise ApiError(400, f"{name} must be null where raw is true, got {shown(value)}", name)
        return self.completion(CompletionBody, model, {"prompt": self.prompt})


def texts_of(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MAX_INPUTS or not all(isinstance(text, str) for text in texts):
        raise TypeError
    return [check_utf8(text) for text in texts]


Texts = Annotated[
    list[str], validator(str | list[str], f"must be a text, or a list of at most {MAX_INPUTS} texts", texts_of)
]


class OllamaEmbeddingsBody(OllamaBody):
    """The body of /api/embeddings, which older clients send."""

    without_effect = ("keep_alive",)

    model: str
    prompt: Text = ""
    options: OllamaOptions | None = None

    def params(self, service: Service) -> PoolingParams:
        """Return how vectors are made, of at most as many tokens as the model takes; ApiError for unknown fields."""
        return self._params(service, {"truncate_prompt_tokens": -1})

    def _params(self, service: Service, given: dict[str, Any]) -> PoolingParams:
        self.reject_unsupported()
        if self.options is not None:
            self.options.reject_unsupported("options.")
        try:
            return service.llm.engine.prompts.pooling.merge(**given)
        except ValueError as error:
            raise bad_request(error) from None


class OllamaEmbedBody(OllamaEmbeddingsBody):
    """The body of /api/embed."""

    input: Texts = []
    truncate: bool | None = None
    dimensions: int | None = None

    def params(self, service: Service) -> PoolingParams:
        """Return how vectors are made; ApiError for what the model does not allow, and unknown fields."""
        cut = None if self.truncate is False else -1
        return self._params(service, {"dimensions": self.dimensions, "truncate_prompt_tokens": cut})


class OllamaShowBody(OllamaBody):
    """The body of /api/show."""

    without_effect = ("options", "system", "template", "verbose")

    model: str | None = None
    name: str | None = None  # what older clients call the model

    def given(self) -> str:
        """Return the model's name; ApiError if there is none."""
        self.reject_unsupported()
        name = self.model or self.name
        if not name:
            raise ApiError(400, "model must be given, got none", "model")
        return name


def with_images(text: str | None, images: list[str] | None) -> str | list[Message] | None:
    """Return a message's content: a text, and with images, files in base64, their parts before it."""
    if not images:
        return text
    parts = [image_part(image if image.startswith("data:") else f"data:image/any;base64,{image}") for image in images]
    return [*parts, *([{"type": "text", "text": text}] if text else [])]


def plain_messages(messages: list[OllamaMessage]) -> Iterator[Message]:
    """Yield messages in the form of chat completions.

    Calls and results get ids, which some chat templates need: a result without one belongs to the first call of its
    tool that has no result yet.
    """
    waiting: list[tuple[str, str]] = []  # name and id of calls without a result
    number = 0
    for at, message in enumerate(messages):
        message.check(f"messages[{at}].")
        plain: Message = {"role": message.role, "content": with_images(message.content, message.images)}
        if message.thinking:
            plain["reasoning_content"] = message.thinking
        calls = []
        for call in message.tool_calls or ():
            id = call.id or f"call_{number}"
            number += 1
            waiting.append((call.function.name, id))
            function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
            calls.append({"id": id, "type": "function", "function": function})
        if calls:
            plain["tool_calls"] = calls
        if message.role == "tool":
            matches = (one for name, one in waiting if not message.tool_name or name == message.tool_name)
            id = message.tool_call_id or next(matches, f"call_{number}")
            number += 1
            waiting = [one for one in waiting if one[1] != id]
            plain["tool_call_id"] = id
            if message.tool_name:
                plain["name"] = message.tool_name
        yield plain
