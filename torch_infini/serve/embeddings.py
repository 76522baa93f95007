"""Embeddings over HTTP: the bodies of /v1/embeddings and /pooling, and the vectors of their inputs."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from ..engine import LoRARequest, PoolingParams, SamplingParams
from ..engine.pooling import Pooling
from .errors import ApiError, bad_request, shown
from .fields import Body, validator
from .schemas import prompts_of
from .service import Service

MAX_INPUTS = 2048  # as OpenAI's server
Inputs = Annotated[
    list[str | list[int]],
    validator(
        str | list[str] | list[int] | list[list[int]],
        f"must be a text, token ids, or a list of texts or of token ids, from 1 to {MAX_INPUTS}",
        lambda value: inputs_of(value),
    ),
]


def inputs_of(value: Any) -> list[str | list[int]]:
    """Return the inputs of a body as a list; TypeError for anything else, no inputs or too many."""
    found = prompts_of(value)
    if not 0 < len(found) <= MAX_INPUTS:
        raise TypeError
    return found


class EmbeddingsBody(Body):
    """The body of /v1/embeddings."""

    without_effect: ClassVar[Collection[str]] = {"user"}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None

    def params(self, service: Service) -> PoolingParams:
        """Return how vectors are made; ApiError for what the model does not allow, and unknown fields."""
        return self.merged(service, {})

    def merged(self, service: Service, more: dict[str, Any]) -> PoolingParams:
        self.reject_unsupported()
        try:
            names = ("dimensions", "truncate_prompt_tokens", "prompt_name")
            params = service.llm.engine.prompts.pooling.merge(**{name: getattr(self, name) for name in names}, **more)
        except ValueError as error:
            raise bad_request(error) from None
        if self.prompt_name is not None and any(isinstance(one, list) for one in self.input):
            rule = "prompt_name must be left out for token ids"
            raise ApiError(400, f"{rule}, got {shown(self.prompt_name)}", "prompt_name")
        return params

    def shown(self, vector: Tensor) -> list[float] | str:
        """Return a vector in the body's format: numbers, or float32 in little-endian bytes as base64."""
        if self.encoding_format != "base64":
            numbers: list[float] = vector.tolist()
            return numbers
        return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


class PoolingBody(EmbeddingsBody):
    """The body of /pooling."""

    pooling: Pooling | None = None
    normalize: bool | None = None

    def params(self, service: Service) -> PoolingParams:
        return self.merged(service, {"pooling": self.pooling, "normalize": self.normalize})


class Tokens(NamedTuple):
    """The tokens of a text, and of a pair of texts their token_type_ids, where the model has some."""

    ids: list[int]
    types: list[int] | None = None


class Embedded(NamedTuple):
    """The vectors of inputs, and the number of their tokens."""

    vectors: list[Tensor]
    tokens: int


async def embed(
    service: Service,
    inputs: Sequence[str | list[int]],
    params: PoolingParams,
    adapter: LoRARequest | None,
    param: str = "input",
) -> Embedded:
    """Return the vectors of inputs; as many at a time as a step of the engine takes.

    Args:
        service: Computes them.
        inputs: Texts or token ids.
        params: Of all inputs.
        adapter: The adapter of all inputs, or None.
        param: The field of the request that has them.

    Raises:
        ApiError: For an input that cannot be served, a full queue, a server that shuts down, or a step that failed.
    """
    service.admit(min(len(inputs), service.llm.engine.config.max_num_seqs), SamplingParams(), param, generates=False)
    prompts = await service.encode_all(inputs, param, params)
    params = replace(params, prompt_name=None)  # texts have their beginning by now
    return await compute(service, [Tokens(ids) for ids in prompts], params, param, adapter)


async def compute(
    service: Service, texts: Sequence[Tokens], params: PoolingParams, param: str, adapter: LoRARequest | None = None
) -> Embedded:
    """Return the vectors, or with ScoreParams the scores, of tokenized texts; ApiError as embed.

    Args:
        service: Computes them, as many at a time as a step of the engine takes.
        texts: At least one.
        params: Of all texts.
        param: The field of the request that has them.
        adapter: The adapter of all texts, or None.
    """
    engine, found = service.llm.engine, dict[int, Tensor]()
    size = engine.config.max_num_seqs
    service.check_length(max(len(text.ids) for text in texts), param)
    order = list(range(len(texts)))
    if engine.is_encoder:  # texts of about one length are computed in one call
        order.sort(key=lambda i: len(texts[i].ids))
    for at in range(0, len(texts), size):
        part = order[at : at + size]
        try:
            requests = [engine.new_request(texts[i].ids, None, adapter, params, texts[i].types) for i in part]
        except ValueError as error:
            raise bad_request(error, prompt=param, tensor_parallel_size="model") from None
        generation = service.start_requests(requests, param)
        try:
            outputs = await generation.finish()
        finally:
            generation.close()
        vectors = [output.pooled for output in outputs if output.pooled is not None]
        if len(vectors) != len(part):
            raise ApiError(500, "the server failed; its log has the cause")
        found.update(zip(part, vectors, strict=True))
    return Embedded([found[i] for i in range(len(texts))], sum(len(text.ids) for text in texts))
