"""Prompts: what an engine makes of the prompts of requests: token ids that are checked, cut, and within its limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import described
from .images import ImageReader
from .pooling import SCORE, PoolingDefaults, PoolingParams
from .sampling_params import SamplingParams
from .sequence import plain_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SAMPLES = 1024  # of a prompt
_NAME = "torch_infini.Engine"
# The last as vLLM's: {"prompt": text}, {"prompt_token_ids": ids}, or {"prompt": text, "multi_modal_data": {"image": x}}
Prompt = str | SequenceOf[int] | Mapping[str, Any]


class Prompts:
    """Tokenizes and checks prompts.

    Args:
        tokenizer: A transformers tokenizer; None: prompts are token ids.
        vocabulary: The model's number of ids.
        max_model_len: The most tokens of a sequence.
        is_encoder: Whether the model generates nothing.

    Attributes:
        tokenizer: As given.
        pooling: What the model's folder says of its embeddings.
        images: Reads images for the model.
        reads_parts: Whether chat templates want a message's text as a part (chat.reads_parts), as far as known.
        max_prompt_len: The most tokens of a prompt: a decoder generates at least one after it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, max_model_len: int, is_encoder: bool
    ) -> None:
        self.tokenizer, self.pooling = tokenizer, PoolingDefaults()
        self.images = ImageReader(Path("-"), reason="it was loaded without the files of its processor")
        self.reads_parts: dict[str, bool] = {}
        self._vocabulary, self._is_encoder = vocabulary, is_encoder
        self.max_prompt_len = max_model_len if is_encoder else max_model_len - 1

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; the tokenizer adds its special tokens."""
        if self.tokenizer is None:
            raise ValueError(f"{_NAME}: prompt must be token ids because the model's folder has no tokenizer, got text")
        try:
            return list(self.tokenizer(text)["input_ids"])
        except Exception as error:
            raise ValueError(f"{_NAME}: the tokenizer must encode the prompt, got {described(error)}") from error

    def with_images(self, prompt: Prompt) -> Prompt:
        """Return a prompt with multi_modal_data as a PromptWithImages; any other as it is.

        Raises:
            ValueError: For data that is no image, or images that the model cannot have.
        """
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        if data is None or not isinstance(prompt, Mapping):
            return prompt
        if not isinstance(data, Mapping) or set(data) - {"image"}:
            raise ValueError(f'{_NAME}: multi_modal_data must be {{"image": image or images}}, got {shown_keys(data)}')
        text, found = prompt.get("prompt"), data.get("image")
        if not isinstance(text, str) or prompt.get("prompt_token_ids") is not None:
            raise ValueError(
                f"{_NAME}: prompt must be a text where it has images, got {prompt.get('prompt_token_ids')!r}"
            )
        images = list(found) if isinstance(found, list | tuple) else [] if found is None else [found]
        if not images:
            return {key: value for key, value in prompt.items() if key != "multi_modal_data"}
        return self.images.read(text, images)

    def encode_pooled(self, prompt: str | Iterable[Any], pooling: PoolingParams) -> list[Any]:
        """Return the tokens of a prompt that becomes a vector.

        A text begins with the prompt that `pooling` names, and keeps its last special tokens where it is cut.
        """
        if isinstance(prompt, str):
            ids: list[Any] = self.encode(self.pooling.prepare(prompt, pooling.prompt_name))
        elif pooling.prompt_name is not None:
            raise ValueError(f"{_NAME}: prompt_name must be None for token ids, got {pooling.prompt_name!r}")
        else:
            ids = list(prompt)
        kept = self._kept(ids, pooling, isinstance(prompt, str))
        return ids if len(kept) == len(ids) else [ids[i] for i in kept]

    def _kept(self, ids: list[Any], pooling: PoolingParams, has_special: bool) -> SequenceOf[int]:
        """Return the indices of the tokens that truncate_prompt_tokens keeps."""
        most = pooling.truncate_prompt_tokens
        if most is None:
            return range(len(ids))
        special = getattr(self.tokenizer, "all_special_ids", ()) if has_special else ()
        return shortened(ids, self.max_prompt_len if most == -1 else most, special)

    def encode_pair(self, first: str, second: str, pooling: PoolingParams) -> tuple[list[int], list[int] | None]:
        """Return the tokens of two texts, as a cross-encoder reads them, and their token_type_ids, if it has some.

        Where they are cut, the second loses its last tokens.
        """
        if self.tokenizer is None:
            raise ValueError(f"{SCORE}: the model's folder must have a tokenizer for texts, got one without")
        lower = self.pooling.lower
        try:
            # Lists, because the pair of one text and an empty one would be tokenized as the first alone.
            pair = ([text.lower() if lower else text] for text in (first, second))
            found: Any = self.tokenizer(*pair)
        except Exception as error:
            raise ValueError(f"{_NAME}: the tokenizer must encode the prompt, got {described(error)}") from error
        ids, types = found["input_ids"][0], found.get("token_type_ids")
        kept = self._kept(ids, pooling, True)
        return [ids[i] for i in kept], None if types is None else [types[0][i] for i in kept]

    def truncated(self, ids: Iterable[Any], params: SamplingParams) -> Iterable[Any]:
        """Return the prompt's last tokens, as many as truncate_prompt_tokens says."""
        if params.truncate_prompt_tokens is None:
            return ids
        kept = params.truncate_prompt_tokens if params.truncate_prompt_tokens > 0 else self.max_prompt_len
        return list(ids)[-kept:]

    def tokenize_bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Tokenize bad_words, each alone and with a space before it."""
        if params.bad_words and self.tokenizer is None:
            raise ValueError(f"{_NAME}: bad_words must be empty where there is no tokenizer, got {params.bad_words}")
        words = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        found = (
            [self.tokenizer(word, add_special_tokens=False)["input_ids"] for word in words] if self.tokenizer else []
        )
        return [list(tokens) for tokens in dict.fromkeys(map(tuple, found)) if tokens]

    def checked(self, prompt: Iterable[Any], params: SamplingParams) -> list[int]:
        """Return the prompt's ids as plain integers; ValueError if the request cannot be served."""
        vocabulary, limit = self._vocabulary, self.max_prompt_len + (not self._is_encoder)
        tokens = plain_ids(f"{_NAME}: prompt", prompt, vocabulary)
        if not tokens:
            raise ValueError(f"{_NAME}: prompt must have at least one token, got none")
        if len(tokens) > self.max_prompt_len:
            rule = (
                f"at most {limit} tokens, the lesser of max_model_len and the model's positions"
                if self._is_encoder
                else f"shorter than {limit} tokens, the lesser of max_model_len and the cache's size"
            )
            raise ValueError(f"{_NAME}: prompt must be {rule}, got {len(tokens)}")
        if params.n > MAX_SAMPLES:
            raise ValueError(f"{_NAME}: n must be at most {MAX_SAMPLES}, got {params.n}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"{_NAME}: stop must be empty where there is no tokenizer, got {params.stop}")
        outside = [t for t in (*params.stop_token_ids, *(params.logit_bias or ())) if t >= vocabulary]
        if outside:
            raise ValueError(
                f"{_NAME}: stop_token_ids and logit_bias must name tokens from 0 to {vocabulary - 1}, got {outside[0]}"
            )
        return tokens


def parts_of(prompt: Prompt) -> tuple[str | None, Iterable[Any] | None]:
    """Return a prompt's text and its token ids, one of which may be None; ValueError for anything else."""
    text: str | None
    ids: Iterable[Any] | None
    if isinstance(prompt, Mapping):
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        more = [key for key, value in prompt.items() if key not in ("prompt", "prompt_token_ids") and value is not None]
        if more or (text is None and ids is None) or not (text is None or isinstance(text, str)):
            forms = '{"prompt": text} or {"prompt_token_ids": ids}'
            raise ValueError(f"{_NAME}: prompt must be text, token ids, {forms}, got {prompt!r}")
    elif isinstance(prompt, str):
        return prompt, None
    else:
        text, ids = None, prompt
    no_ids = not isinstance(ids, Iterable) or isinstance(ids, (str, bytes, bytearray, Mapping))
    if no_ids and (text is None or ids is not None):
        raise ValueError(f"{_NAME}: prompt must be text or token ids, got {prompt!r}")
    return text, ids


def shortened(ids: SequenceOf[Any], most: int, special: Collection[int]) -> list[int]:
    """Return the indices of a text's first tokens, at most this many, and of the special ones at its end."""
    if len(ids) <= most:
        return list(range(len(ids)))
    end = next((i for i, token in enumerate(reversed(ids)) if token not in special), 0)
    return list(range(most)) if end >= most else [*range(most - end), *range(len(ids) - end, len(ids))]


def shown_keys(data: Any) -> str:
    return ", ".join(map(repr, data)) if isinstance(data, Mapping) else type(data).__name__
