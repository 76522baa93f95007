"""GenerationMixin: generate for a model written in Python, whose forward returns logits; and infini_to_numpy.

InferEngine has its own generate, which computes many rows at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ....models.config import token_ids
from ... import infinicore
from ..cache_utils import Cache, DynamicCache
from ..convert import as_torch, like
from ..infer_engine import GenerationConfig

if TYPE_CHECKING:
    import numpy


def infini_to_numpy(infini_tensor: Any) -> numpy.ndarray[Any, Any]:
    """Return a numpy array with a copy of a tensor's elements, on any device; bfloat16 needs the package ml_dtypes."""
    # Not by to_numpy(): callers write `infinicore.Tensor.to_numpy = infini_to_numpy`.
    return infinicore.Tensor(infini_tensor).to("cpu").__array__(copy=True)


class GenerationMixin:
    """Adds generate() to a class whose forward takes input_ids and returns logits.

    forward is called as forward(input_ids, ...) with those of position_ids, past_key_values, use_cache and
    cache_position that it has parameters for. It returns logits [batch, tokens, vocabulary] of all new tokens or of the
    last, or a tuple or object that holds them as its first element or as `logits`; infinicore's or torch's. Without a
    parameter past_key_values it gets all tokens in every call.
    """

    def prepare_inputs_for_generation(
        self, input_ids: Any, past_key_values: Cache | None = None, **model_inputs: Any
    ) -> dict[str, Any]:
        """Return the arguments of a call of forward; subclasses may change them.

        Args:
            input_ids: [batch, tokens] int64, the new tokens; infinicore's, or torch's if generate's are.
            past_key_values: The cache; None if forward takes none.
            **model_inputs: position_ids [batch, tokens], cache_position [tokens] and use_cache.
        """
        inputs = {"input_ids": input_ids, "past_key_values": past_key_values, **model_inputs}
        parameters = inspect.signature(self.forward).parameters  # type: ignore[attr-defined]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return inputs
        return {name: value for name, value in inputs.items() if name in parameters}

    def generate(
        self,
        input_ids: Any,
        generation_config: GenerationConfig | None = None,
        *,
        past_key_values: Cache | None = None,
        tokenizer: Any = None,
        **settings: Any,
    ) -> list[Any]:
        """Continue prompts of equal length.

        Args:
            input_ids: [batch, tokens], infinicore's or torch's.
            generation_config: None: GenerationConfig().
            past_key_values: An empty cache, or one with the tokens before input_ids; None: a DynamicCache of
                self.config, if forward takes a cache.
            tokenizer: Its eos_token_id ends rows, if neither the settings nor self.config have one.
            **settings: Fields of GenerationConfig that override generation_config's.

        Returns:
            For each step the tokens of all rows, [batch] int64 of the kind of input_ids. It ends when all rows have
            ended; a row that ended before repeats its last token.

        Raises:
            TypeError: For an unknown setting.
            ValueError: For input_ids or logits of another shape, or without max_new_tokens if no end token is known.
        """
        g = replace(generation_config or GenerationConfig(), **settings)
        ids, convert = as_torch(input_ids), like(input_ids)
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.numel() == 0:
            got = list(ids.shape) if isinstance(ids, torch.Tensor) else type(input_ids).__name__
            raise ValueError(f"{_NAME}: input_ids must be a tensor [batch, tokens], not empty, got {got}")
        ends = _ends(g, self, tokenizer)
        if g.max_new_tokens is None and not len(ends):
            raise ValueError(f"{_NAME}: max_new_tokens must be given where no end token is known, got None")
        parameters = inspect.signature(self.forward).parameters  # type: ignore[attr-defined]
        cached = "past_key_values" in parameters
        if cached and past_key_values is None:
            past_key_values = DynamicCache(getattr(self, "config", None))
        generator = torch.Generator()
        if g.seed is None:
            generator.seed()
        else:
            generator.manual_seed(g.seed % 2**63)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        new, steps = ids.long(), list[Any]()
        ended = torch.zeros(len(ids), dtype=torch.bool)
        last = ids[:, -1].cpu().long()
        while g.max_new_tokens is None or len(steps) < g.max_new_tokens:
            places = torch.arange(past, past + new.shape[1])
            inputs = self.prepare_inputs_for_generation(
                convert(new.contiguous()),
                past_key_values if cached else None,
                position_ids=convert(places.expand(len(new), -1).contiguous()),
                cache_position=convert(places),
                use_cache=cached,
            )
            logits = _logits(self.forward(**inputs), len(ids))  # type: ignore[attr-defined]
            numbers = torch.rand(len(ids), generator=generator).tolist()
            token = torch.stack([_sampled(row, number, g) for row, number in zip(logits, numbers, strict=True)])
            last = torch.where(ended, last, token)
            steps.append(convert(last.clone()))
            ended = ended | torch.isin(last, ends)
            if bool(ended.all()):
                break
            column = last[:, None].to(ids.device)
            past, new = (past + new.shape[1], column) if cached else (past, torch.cat((new, column), 1))
        return steps


_NAME = "infinilm.generation.utils.GenerationMixin.generate"


def _ends(g: GenerationConfig, model: Any, tokenizer: Any) -> torch.Tensor:
    """Return the tokens that end a row."""
    found: int | Sequence[int] | None = None
    if g.stop_on_eos:
        for source in (g, getattr(model, "config", None), tokenizer):
            found = getattr(source, "eos_token_id", None) if found is None else found
    return torch.tensor(token_ids(found), dtype=torch.int64)


def _logits(output: Any, rows: int) -> torch.Tensor:
    """Return the logits of the last token of each row, [rows, vocabulary]."""
    output = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    found = as_torch(output)
    if not isinstance(found, torch.Tensor) or found.dim() not in (2, 3) or len(found) != rows:
        got = list(found.shape) if isinstance(found, torch.Tensor) else type(output).__name__
        raise ValueError(f"{_NAME}: forward must give logits [{rows}, tokens, vocabulary], got {got}")
    return found[:, -1] if found.dim() == 3 else found


def _sampled(logits: torch.Tensor, number: float, g: GenerationConfig) -> torch.Tensor:
    """Return the token that a random number selects: int64, on the CPU."""
    token = torch.ops.infini.random_sample_given(logits.contiguous(), number, g.top_p, g.top_k, g.temperature)
    if token < 0:  # CUDA's kernel reports errors this way; the CPU's raises
        raise RuntimeError(f"{_NAME}: logits must be finite numbers, got others")
    return token.long().cpu()
