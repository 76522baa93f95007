"""Predictor: an LLM for Ray Data's map_batches, with settings and an error of each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...engine import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from ...engine.sequence import Request

_NAME = "torch_infini.integrations.ray.Predictor"
OUTPUTS = ("generated_text", "generated_tokens", "finish_reason", "error")
Batch = dict[str, Any]  # by column: an array with an element for each row


class Predictor:
    """Continues the prompts of batches of rows: the class that Ray Data's map_batches gets.

    A batch has the column `prompt` (texts or token ids) or `messages` (conversations of {"role": ..., "content": ...}),
    and may have `sampling_params` (mappings of SamplingParams' fields; what is null is the default) and `seed`. A row's
    tokens follow from these alone, whatever else is in the batch and however often an actor is restarted, if it has a
    seed or temperature 0.

    The rows come back in their order with four columns more: `generated_text`, `generated_tokens`, `finish_reason`
    ("stop", "length" or "error") and `error`: "", or one sentence that says why this row has no text.

    Args:
        model: As LLM's: a folder that every node has, a GGUF file, or a name of the hub.
        sampling: Fields of SamplingParams for rows that do not give them.
        **settings: Other arguments of LLM: quantization, max_model_len, max_num_seqs, ...

    Raises:
        FileNotFoundError, ValueError: As LLM; ValueError also for defaults that SamplingParams rejects.

    Example:
        >>> ds = ray.data.from_items([{"prompt": "Once upon a time", "seed": 1}, {"prompt": "def main("}])
        >>> ds = ds.map_batches(
        ...     Predictor,
        ...     fn_constructor_kwargs={"model": "/models/Qwen3-4B", "sampling": {"max_tokens": 64}},
        ...     compute=ray.data.ActorPoolStrategy(size=2),
        ...     num_cpus=8,  # the threads of each
        ...     batch_size=64,
        ... )
    """

    def __init__(self, model: str | Path, sampling: Mapping[str, Any] | None = None, **settings: Any) -> None:
        self._defaults = dict(sampling or {})
        self._check_defaults()
        self._llm = LLM(model, **{"progress": False, **settings})

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with the columns of OUTPUTS.

        Args:
            batch: Columns by name, each with an element for each row (batch_format "numpy", Ray's default).

        Raises:
            ValueError: For a batch without prompts, or with a column of OUTPUTS.
            RuntimeError: If the engine failed; Ray then computes the batch again, as it is told.
        """
        if ("prompt" in batch) == ("messages" in batch):
            came = "both" if "prompt" in batch else f"neither among {', '.join(sorted(batch)) or 'none'}"
            raise ValueError(f"{_NAME}: batch must have the column prompt or messages, got {came}")
        if taken := [name for name in OUTPUTS if name in batch]:
            raise ValueError(f"{_NAME}: batch must have no column {taken[0]}, which is one of the outputs, got one")
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        requests = [self._request(row) for row in rows]
        good: list[Any] = [request for request in requests if isinstance(request, Request)]
        outputs = self._llm.iterate(good)
        results = [failed(request) if isinstance(request, str) else result_of(next(outputs)) for request in requests]
        columns = [column_of(values) for values in zip(*results, strict=True)] or [column_of(())] * len(OUTPUTS)
        return {**batch, **dict(zip(OUTPUTS, columns, strict=True))}

    def _check_defaults(self) -> None:
        """Raise ValueError unless SamplingParams takes the defaults."""
        try:
            params_of(self._defaults)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{_NAME}: sampling must have fields of SamplingParams, got an error: {error}") from error

    def _request(self, row: Mapping[str, Any]) -> Request | str:
        """Return a row's request, or why there is none."""
        try:
            given = plain(row.get("sampling_params"))
            if given is not None and not isinstance(given, Mapping):
                raise ValueError(f"{_NAME}: sampling_params must be a mapping or null, got {shown(given)}")
            own = {name: value for name, value in (given or {}).items() if value is not None}
            if (seed := plain(row.get("seed"))) is not None:
                own["seed"] = int(seed) if isinstance(seed, float) and seed.is_integer() else seed
            params = params_of({**self._defaults, **own})
            prompt = plain(row["prompt"]) if "prompt" in row else self._conversation(plain(row["messages"]))
            if prompt is None:
                raise ValueError(f"{_NAME}: prompt must be a text or token ids, got null")
            return self._llm.engine.new_request(prompt, params)
        except (ImportError, TypeError, ValueError) as error:
            return " ".join(str(error).split()) or type(error).__name__

    def _conversation(self, messages: Any) -> list[int]:
        """Return the tokens of a row's conversation."""
        if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(f"{_NAME}: messages must be a list of mappings, got {shown(messages)}")
        # Where only some rows have a field, a table's others have null.
        filled = [{name: value for name, value in one.items() if value is not None} for one in messages]
        return self._llm.chat_prompt(filled)


def params_of(fields: Mapping[str, Any]) -> SamplingParams:
    """Make SamplingParams of a row's fields, whose structured_outputs may be a mapping; n must be 1."""
    form = fields.get("structured_outputs")
    if isinstance(form, Mapping):
        given = {name: value for name, value in form.items() if value is not None}
        fields = {**fields, "structured_outputs": StructuredOutputsParams(**given)}
    params = SamplingParams(**fields)
    if params.n != 1:
        raise ValueError(f"{_NAME}: n must be 1, because a row has one text, got {params.n}")
    return params


def plain(value: Any) -> Any:
    """Return an element of a column in Python's own types: arrays as lists, NaN (pandas' null) as None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def column_of(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return elements of any type as a column; lists stay lists."""
    column = np.empty(len(values), dtype=object)
    for at, value in enumerate(values):
        column[at] = value
    return column


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def failed(error: str) -> tuple[str, list[int], str, str]:
    """Return the OUTPUTS of a row that cannot be served."""
    return "", [], "error", error


def result_of(output: RequestOutput) -> tuple[str, list[int], str, str]:
    """Return the OUTPUTS of a row."""
    completion = output.outputs[0]
    reason = completion.finish_reason or "error"
    error = completion.error or ("the request was cancelled" if reason == "abort" else "")
    return completion.text, completion.token_ids, "error" if error else reason, error
