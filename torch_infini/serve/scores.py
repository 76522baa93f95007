"""Scores over HTTP: the bodies of /score, /classify and /rerank in vLLM's form, the last Jina's and Cohere's, and the
scores of pairs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from ..engine import SamplingParams, ScoreParams
from .embeddings import MAX_INPUTS, Embedded, Inputs, Tokens, compute
from .errors import ApiError, bad_request, shown
from .fields import Body, check_utf8, validator
from .service import Service, bytes_in


def texts_of(value: Any) -> list[str]:
    """Return the texts of a body as a list; TypeError for anything else, none or too many."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not 0 < len(found) <= MAX_INPUTS:
        raise TypeError
    texts = [one["text"] if isinstance(one, dict) and set(one) == {"text"} else one for one in found]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    return [check_utf8(text) for text in texts]


def documents_of(value: Any) -> list[str]:
    """Return the documents of /rerank; as texts_of, of a list alone."""
    if not isinstance(value, list):
        raise TypeError
    return texts_of(value)


Texts = Annotated[
    list[str],
    validator(
        str | list[str], f"must be a text or a list of texts, from 1 to {MAX_INPUTS}", lambda value: texts_of(value)
    ),
]
Documents = Annotated[
    list[str],
    validator(
        list[str | dict[str, str]],
        f'must be a list of texts, or of {{"text": TEXT}}, from 1 to {MAX_INPUTS}',
        lambda value: documents_of(value),
    ),
]
Text = Annotated[str, validator(str, "must be a text", lambda value: texts_of([value])[0])]


class ScoredBody(Body):
    """What all bodies have; `labels` is how many a model must have, any number if None."""

    labels: ClassVar[int | None] = 1
    without_effect: ClassVar[Collection[str]] = {"user"}
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None

    def params(self, service: Service) -> ScoreParams:
        """Return how scores are made; ApiError for a model that has none, and for unknown fields."""
        self.reject_unsupported()
        try:
            return service.llm.engine.score_params(self.use_activation, self.truncate_prompt_tokens, only=self.labels)
        except ValueError as error:
            raise bad_request(error) from None


class ScoreBody(ScoredBody):
    """The body of /score; both names of a field are vLLM's."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    def pairs(self) -> tuple[list[tuple[str, str]], str]:
        """Return the pairs, and the name of the field with the second texts; ApiError for ones that do not match."""
        names = (
            ("queries", "documents") if self.queries is not None or self.documents is not None else ("text_1", "text_2")
        )
        first, second = (getattr(self, name) for name in names)
        for name, texts in zip(names, (first, second), strict=True):
            if texts is None:
                raise ApiError(400, f"{name} must be given, got none", name)
        if self.queries is not None and (self.text_1 is not None or self.text_2 is not None):
            raise ApiError(400, "text_1 must be left out where queries are given, got both", "text_1")
        if len(first) not in (1, len(second)):
            rule = f"{names[0]} must be one text, or one for each of {len(second)}"
            raise ApiError(400, f"{rule}, got {len(first)}", names[0])
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True)), names[1]


class ClassifyBody(ScoredBody):
    """The body of /classify."""

    labels: ClassVar[int | None] = None

    input: Inputs


class RerankBody(ScoredBody):
    """The body of /rerank."""

    query: Text
    documents: Documents
    top_n: int | None = None
    return_documents: bool | None = None

    @property
    def count(self) -> int:
        """The number of results; ApiError for a top_n below 0, of which 0 asks for all."""
        if self.top_n is not None and self.top_n < 0:
            raise ApiError(400, f"top_n must be an integer of at least 0, got {shown(self.top_n)}", "top_n")
        return min(self.top_n or len(self.documents), len(self.documents))


async def score(service: Service, pairs: Sequence[tuple[str, str]], params: ScoreParams, param: str) -> Embedded:
    """Return the scores [1] of pairs of texts; ApiError as embed, with the field `param` of the second texts."""
    engine = service.llm.engine
    service.admit(min(len(pairs), engine.config.max_num_seqs), SamplingParams(), param, generates=False)
    texts = []
    for first, second in pairs:
        size = bytes_in(first) + bytes_in(second)
        try:
            encode = partial(engine.prompts.encode_pair, first, second, params)
            texts.append(Tokens(*await service.in_tokenizer(encode, size=size)))
        except ValueError:
            raise ApiError(400, f"{param} must be texts that the model's tokenizer takes", param) from None
    return await compute(service, texts, params, param)
