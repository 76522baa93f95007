"""LLM: prompts in, texts out, for scripts. It loads a model folder and steps an Engine until all is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..distributed.workers import share
from ..models import Llama
from ..nn import WeightFormat
from .engine import Engine, EngineConfig
from .outputs import Metrics, RequestOutput
from .runner import follow
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | SequenceOf[int]
Message = Mapping[str, Any]  # {"role": ..., "content": ...}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class LLM:
    """A model that continues prompts, many at a time.

    Args:
        model: A Hugging Face folder of a llama, mistral, qwen2 or qwen3 model on this machine, or a Llama.
        weights: "dense", or "int8" or "int4", to which the linear layers are quantised while they are read; not for a
            folder in which torch_infini.save_patched has left integers, which are taken as they are.
        dtype: Of activations and dense weights; None: the checkpoint's.
        device: Where the model runs.
        tokenizer: Of transformers; None: the folder's, if it has one. Without one prompts are token ids.
        progress: Whether reading shows its speed on stderr; None: if that is a terminal.
        tensor_parallel: How many ranks share the model: under torchrun its processes, which all make the same calls;
            otherwise, on the CPU, this process and others that it starts, which share its threads.
        **settings: Fields of EngineConfig.

    Attributes:
        engine: The Engine.

    Raises:
        FileNotFoundError: For a folder or file that is not there.
        ValueError: For a config, checkpoint or setting that is not served.

    Example:
        >>> llm = torch_infini.LLM("path/to/model", weights="int8")
        >>> for output in llm.generate(["Once upon a time", "def main("], SamplingParams(max_tokens=32)):
        >>>     print(output.text)
    """

    def __init__(
        self,
        model: str | Path | Llama,
        *,
        weights: WeightFormat = "dense",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        tokenizer: PreTrainedTokenizerBase | None = None,
        progress: bool | None = None,
        tensor_parallel: int = 1,
        **settings: Any,
    ) -> None:
        config = EngineConfig(**settings)
        if not isinstance(model, Llama):
            folder = Path(model)
            tokenizer = tokenizer or load_tokenizer(folder)
            ranks = share(tensor_parallel, device) if tensor_parallel != 1 else None
            read = partial(Llama.from_pretrained, folder, weights, dtype, str(device), ranks=ranks)
            if ranks is None or ranks.workers is None:
                model = read(progress=progress)
            else:
                ranks.workers.make(follow, folder, weights, dtype, str(device))
                with ranks.workers.watched():
                    model = read(progress=progress)
        self.engine = Engine(model, tokenizer, config)
        self._lock = threading.RLock()
        self._outputs: dict[str, deque[RequestOutput]] = {}  # of each request in progress, what was not taken yet

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, as many at a time as the engine takes.

        Args:
            prompts: A text or token ids, or several of them.
            params: For all prompts, or one for each; None: SamplingParams().

        Returns:
            One output for each prompt, in their order. One that went wrong has completions with finish "error".

        Raises:
            ValueError: For a prompt that cannot be served; none is computed then.
        """
        if not isinstance(prompts, Sized):
            raise ValueError(
                f"torch_infini.LLM.generate: prompts must be a list of texts or token ids, got {prompts!r}"
            )
        if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item]
        if params is None or isinstance(params, (SamplingParams, str, Mapping)):
            params = [params] * len(prompts)  # of another type: refused with the first prompt
        if len(params) != len(prompts):
            raise ValueError(
                f"torch_infini.LLM.generate: params must be one for all or one for each of {len(prompts)} prompts, "
                f"got {len(params)}"
            )
        ids: list[str] = []
        try:
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                try:
                    ids.append(self._add(prompt, one, keep=1))
                except ValueError as error:
                    raise ValueError(f"{error} (prompt {i})") from None
            return [deque(self._follow(id), maxlen=1).pop() for id in ids]
        finally:
            self._drop(ids)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt, and tell of every step; leaving the loop cancels the rest.

        Args:
            prompt: Text or token ids.
            params: None: SamplingParams().

        Yields:
            The output as far as it has come; its completions' new_text and new_tokens are what is new.

        Raises:
            ValueError: For a prompt that cannot be served.
        """
        id = self._add(prompt, params)
        return self._streamed(id)

    def _streamed(self, id: str) -> Iterator[RequestOutput]:
        try:
            yield from self._follow(id)
        finally:
            self._drop([id])

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], or several such lists.
            params: As generate.

        Returns:
            As generate.

        Raises:
            ValueError: If the tokenizer has no chat template, or as generate.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.chat_prompt(conversation) for conversation in conversations], params)  # type: ignore[arg-type]

    def chat_prompt(self, messages: SequenceOf[Message]) -> list[int]:
        """The tokens of a conversation up to where the assistant answers; ValueError if there is no chat template."""
        tokenizer = self.engine.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "torch_infini.LLM.chat: the model's tokenizer must have a chat template (use generate), got one without"
                if tokenizer is not None
                else "torch_infini.LLM.chat: the model's folder must have a tokenizer, got one without"
            )
        assert tokenizer is not None
        return list(
            tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)["input_ids"]
        )

    def metrics(self) -> Metrics:
        """What the engine did so far."""
        return self.engine.metrics()

    def _add(self, prompt: Prompt, params: SamplingParams | None, keep: int | None = None) -> str:
        """Take a request in; of its outputs that nobody took yet the last `keep` are kept, or all."""
        with self._lock:
            id = self.engine.add(prompt, params)
            self._outputs[id] = deque(maxlen=keep)
            return id

    def _follow(self, id: str) -> Iterator[RequestOutput]:
        """A request's outputs; steps the engine, for all requests, where none is there yet."""
        mine = self._outputs[id]
        while True:
            with self._lock:
                while not mine:
                    for output in self.engine.step():
                        if output.id in self._outputs:
                            self._outputs[output.id].append(output)
                output = mine.popleft()
            yield output
            if output.is_finished:
                return

    def _drop(self, ids: SequenceOf[str]) -> None:
        """Forget requests; those that go on are cancelled."""
        with self._lock:
            for id in ids:
                del self._outputs[id]
                self.engine.abort(id)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model folder; None if there is none; ValueError if it cannot be read."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"torch_infini.LLM: {folder} must hold a readable tokenizer, got: {error}") from error
