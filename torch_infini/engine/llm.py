"""LLM: prompts in, texts out, for scripts. It loads a model folder and steps an Engine until all is done."""

from __future__ import annotations

import json
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from .._core.dtypes import floating
from ..checkpoints import has_gguf_tokenizer, model_type_of
from ..distributed import init_tp_group
from ..models import Llama
from ..models.config import DEFAULTS
from ..models.llama import checked_config, found_folder
from .config import EngineConfig
from .defaults import sampling_defaults, sampling_settings
from .engine import Engine, Prompt, described
from .model import ServedModel
from .outputs import Metrics, RequestOutput
from .runner import make_worker
from .sampling_params import SamplingParams
from .sequence import Request

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
_CHAT = "torch_infini.LLM.chat"
_MESSAGES = 'messages must be a list of mappings, {"role": ..., "content": ...}, at least one'
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class LLM:
    """A model that continues prompts, many at a time.

    Args:
        model: A Hugging Face folder, a GGUF file, "owner/model" of the hub (from its cache where there is no network),
            a Llama, or a loaded causal language model of transformers, which patch_model is called on unless it is
            patched. llama, mistral, qwen2 and qwen3 folders are read into a Llama; other types run
            through transformers' own forward over the engine's cache (docs/engine.md). Quantized checkpoints:
            docs/checkpoints.md.
        weights: "dense", or "int8" or "int4", to which the linear layers are quantized while they are read; not for a
            folder in which torch_infini.save_patched has left integers, which are taken as they are.
        dtype: Of activations and dense weights; None: the checkpoint's.
        device: Where the model runs.
        tokenizer: Of transformers; None: that of the folder, or of the folder that a model was loaded from, if it has
            one. Without one prompts are token ids. Code of the folder (auto_map) is never run: a tokenizer that is such
            code has to be given here.
        progress: Whether reading shows its speed on stderr; None: if that is a terminal.
        generation_config: "auto": requests without params have the sampling settings of the folder's
            generation_config.json; "none": those of SamplingParams().
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
        model: str | Path | Llama | nn.Module,
        *,
        weights: str = "dense",
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        tokenizer: PreTrainedTokenizerBase | None = None,
        progress: bool | None = None,
        tensor_parallel: int = 1,
        generation_config: Literal["auto", "none"] = "auto",
        **settings: Any,
    ) -> None:
        config = EngineConfig(**settings)
        if generation_config not in ("auto", "none"):
            raise ValueError(f"torch_infini.LLM: generation_config must be 'auto' or 'none', got {generation_config!r}")
        if not isinstance(model, (str, Path, nn.Module)):
            raise ValueError(
                "torch_infini.LLM: model must be a folder, a Llama or a model of transformers, got "
                f"{type(model).__name__}"
            )
        if not isinstance(tensor_parallel, int) or isinstance(tensor_parallel, bool) or tensor_parallel < 1:
            raise ValueError(
                f"torch_infini.LLM: tensor_parallel must be an integer of at least 1, got {tensor_parallel!r}"
            )
        if isinstance(tokenizer, (str, Path)):
            raise ValueError(
                "torch_infini.LLM: tokenizer must be one of transformers' (AutoTokenizer.from_pretrained makes one) or "
                f"None, got {tokenizer!r}"
            )
        device_of(device)
        sampling: dict[str, Any] = {}
        served: ServedModel
        if isinstance(model, Llama):
            served = model
        elif isinstance(model, nn.Module):
            served = paged_model(model, weights, dtype, tensor_parallel)
            sampling = sampling_settings(model) if generation_config == "auto" else {}
            path = Path(getattr(model, "name_or_path", "") or "-")
            tokenizer = tokenizer or (load_tokenizer(path) if path.exists() else None)
        elif needs_transformers(folder := found_folder(model)):
            if tensor_parallel != 1:
                raise ValueError(
                    f"torch_infini.LLM: tensor_parallel must be 1 for a model that runs through transformers, got "
                    f"{tensor_parallel} for {folder}"
                )
            from ..patch.paged import load_paged

            sampling = sampling_defaults(folder) if generation_config == "auto" else {}
            tokenizer = tokenizer or load_tokenizer(folder)
            served = load_paged(folder, None if weights == "dense" else weights, floating(dtype), device)
        else:
            sampling = sampling_defaults(folder) if generation_config == "auto" else {}
            checked_config(folder)  # what is wrong with a config, the tokenizer's reader would say in other words
            tp_group = init_tp_group(tensor_parallel, device) if tensor_parallel != 1 else None
            tokenizer = tokenizer or load_tokenizer(folder)  # while workers start
            read = partial(Llama.from_pretrained, folder, weights, dtype, str(device), tp_group=tp_group)
            if tp_group is None or tp_group.workers is None:
                served = read(progress=progress)
            else:
                tp_group.workers.make(make_worker, folder, weights, dtype, str(device))
                with tp_group.workers.relay_errors():
                    served = read(progress=progress)
        self.engine = Engine(served, tokenizer, config, sampling)
        self._lock = threading.RLock()
        self._readers: dict[str, weakref.ref[_Reader]] = {}
        self._stepping = False
        self._delivering = False  # the last step's outputs may not all be delivered

    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, as many at a time as the engine takes.

        Args:
            prompts: A text or token ids, also as {"prompt": text} or {"prompt_token_ids": ids}, or several of them.
            params: For all prompts, or one for each; None: the model's own (generation_config).

        Returns:
            One output for each prompt, in their order. One that went wrong has outputs with finish_reason "error".

        Raises:
            ValueError: For a prompt that cannot be served; none is computed then.
        """
        return list(self.iterate(prompts, params))

    def iterate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """As generate, but yield each finished output as soon as all before it are; leaving the loop cancels the rest.

        The prompts are checked when the loop begins.
        """
        rows = prompts_of(prompts)
        settings = params_of(params, len(rows))
        readers: list[_Reader] = []
        try:
            for i, (prompt, one) in enumerate(zip(rows, settings, strict=True)):
                try:
                    readers.append(self._add(prompt, one, keep=1))
                except ValueError as error:
                    raise ValueError(f"{error} (prompt {i})") from None
            for reader in readers:
                yield deque(self._outputs(reader), maxlen=1).pop()
        finally:
            self._drop(readers)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt, with an output for every step; leaving the loop cancels the request.

        The prompt is checked at once; the request begins with the first step of the loop.

        Args:
            prompt: As generate takes one.
            params: None: the model's own (generation_config).

        Yields:
            The output so far; its outputs' new_text and new_token_ids are what the step added.

        Raises:
            ValueError: For a prompt that cannot be served.
        """
        with self._lock:
            request = self.engine.new_request(prompt, params)
        return self._streamed(request)

    def _streamed(self, request: Request) -> Iterator[RequestOutput]:
        reader = self._add(request)
        try:
            yield from self._outputs(reader)
        finally:
            self._drop([reader])

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
        return self.generate(self.chat_prompts(messages), params)

    def chat_prompts(self, messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]]) -> list[list[int]]:
        """Return the tokens of each conversation of chat; errors as there."""
        conversations: Any = messages  # checked here and by chat_prompt
        if isinstance(conversations, SequenceOf) and conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        if not isinstance(conversations, SequenceOf) or isinstance(conversations, (str, bytes)):
            raise ValueError(f"{_CHAT}: {_MESSAGES}, or a list of such lists, got {messages!r}")
        return [self.chat_prompt(conversation) for conversation in conversations]

    def chat_prompt(self, messages: SequenceOf[Message], template: Mapping[str, Any] | None = None) -> list[int]:
        """Return the tokens of a conversation up to the assistant's answer.

        Args:
            messages: As chat takes them.
            template: Variables of the chat template beside the messages, such as enable_thinking.

        Raises:
            ValueError: Without a chat template, or where it does not take the messages.
        """
        is_list = isinstance(messages, SequenceOf) and len(messages) > 0
        if not is_list or not all(isinstance(message, Mapping) and "role" in message for message in messages):
            raise ValueError(f"{_CHAT}: {_MESSAGES}, got {messages!r}")
        tokenizer = self.engine.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "torch_infini.LLM.chat: the model's tokenizer must have a chat template (use generate), got one without"
                if tokenizer is not None
                else "torch_infini.LLM.chat: the model's folder must have a tokenizer, got one without"
            )
        assert tokenizer is not None
        try:
            conversation = [dict(message) for message in messages]
            encoded: Any = tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, return_dict=True, **(template or {})
            )
            return list(encoded["input_ids"])
        except Exception as error:  # a template raises whatever it likes
            raise ValueError(f"{_CHAT}: the chat template must take the messages, got {described(error)}") from error

    def step(self) -> list[RequestOutput]:
        """Step the engine, for a caller that has added requests to it; outputs of all others reach their callers too.

        Returns:
            As Engine.step.
        """
        with self._lock:
            self._step()
            return list(self.engine.outputs)

    def metrics(self) -> Metrics:
        """The engine's Metrics."""
        return self.engine.metrics()

    def _add(self, prompt: Prompt | Request, params: SamplingParams | None = None, keep: int | None = None) -> _Reader:
        """Add a request; its reader keeps the last `keep` outputs that were not taken yet, or all of them."""
        with self._lock:
            request = prompt if isinstance(prompt, Request) else self.engine.new_request(prompt, params)
            reader = _Reader(self.engine.new_id(), keep)
            self._readers[reader.id] = weakref.ref(reader)
            try:
                self.engine.submit(request, reader.id)
                return reader
            except BaseException:
                reader.is_closed = True
                raise

    def _outputs(self, reader: _Reader) -> Iterator[RequestOutput]:
        """Yield a request's outputs; step the engine, for all requests, while none is there."""
        while True:
            with self._lock:
                while not reader.outputs:
                    self._step()
                    if not reader.outputs and not self.engine.has(reader.id):
                        raise RuntimeError(
                            "torch_infini.LLM: the engine must be stepped by the LLM alone while it has requests, got "
                            f"a step of another caller, which was told the end of request {reader.id}"
                        )
                output = reader.take()
            yield output
            if output.finished:
                return

    def _step(self) -> None:
        """Step the engine and deliver the outputs, after those of a step that was interrupted before delivery."""
        self._cancel_dropped()
        self._stepping = True
        try:
            interrupted, self._delivering = self._delivering, True
            if interrupted:
                self._deliver(self.engine.outputs)
            self._deliver(self.engine.step())
            self._delivering = False
        finally:
            self._stepping = False

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            reader = self._readers[output.request_id]() if output.request_id in self._readers else None
            if reader is not None:
                reader.put(output)

    def _cancel_dropped(self) -> None:
        """Cancel the requests whose readers are gone. Not done when a reader goes: the garbage collector may do that
        in the middle of a step, and it may be interrupted.
        """
        for id, reference in list(self._readers.items()):
            reader = reference()
            if reader is None or reader.is_closed:
                self.engine.abort(id)
                self._readers.pop(id, None)

    def _drop(self, readers: SequenceOf[_Reader]) -> None:
        """Close readers; unfinished requests are cancelled, at once unless the engine is in a step."""
        for reader in readers:
            reader.is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                if not self._stepping:  # if it is, by this thread
                    self._cancel_dropped()
            finally:
                self._lock.release()


class _Reader:
    """The caller's side of a request: the outputs that were not taken yet. Dropping it cancels the request."""

    def __init__(self, id: str, keep: int | None) -> None:
        self.id, self.is_closed = id, False
        self.outputs: deque[RequestOutput] = deque(maxlen=keep)
        self._taken: RequestOutput | None = None

    def put(self, output: RequestOutput) -> None:
        """Add an output, unless it was added before."""
        last = self.outputs[-1] if self.outputs else self._taken
        if last is None or output.progress > last.progress:
            self.outputs.append(output)

    def take(self) -> RequestOutput:
        self._taken = self.outputs[0]
        return self.outputs.popleft()


def needs_transformers(folder: Path) -> bool:
    """Whether a checkpoint's model type is not one of Llama's, but one of transformers'."""
    try:
        kind = model_type_of(folder)
    except (ValueError, OSError, NotImplementedError):  # whoever reads it next says what is wrong
        return False
    if not isinstance(kind, str) or kind in DEFAULTS:
        return False
    try:
        from ..patch.paged import is_causal_type
    except ImportError:  # without transformers
        return False
    return is_causal_type(kind)


def paged_model(model: nn.Module, weights: str, dtype: torch.dtype | str | None, tensor_parallel: int) -> ServedModel:
    """Return a model of transformers as the engine calls models; patch it unless it is patched."""
    if tensor_parallel != 1 or dtype is not None:
        name, got = ("dtype", dtype) if dtype is not None else ("tensor_parallel", tensor_parallel)
        raise ValueError(f"torch_infini.LLM: {name} must be left out for a model that is loaded, got {got!r}")
    from ..patch import is_patched, patch_model, unpatch_model
    from ..patch.paged import PagedModel, check_model

    check_model(model)
    was_patched = is_patched(model)
    if was_patched and weights != "dense":
        raise ValueError(f"torch_infini.LLM: weights must be left out for a model that is patched, got {weights!r}")
    if not was_patched:
        patch_model(model, weights=None if weights == "dense" else weights)
    try:
        return PagedModel(model)
    except BaseException:
        if not was_patched and weights == "dense" and is_patched(model):
            unpatch_model(model)
        raise


def device_of(device: torch.device | str) -> torch.device:
    """The device of that name; ValueError for one that cannot be had."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"torch_infini.LLM: device must be cpu, cuda, cuda:N, or infini once it is enabled, got {device!r}"
        ) from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"torch_infini.LLM: device must be one that torch sees, got {device} of {torch.cuda.device_count()} GPUs"
        )
    return found


def prompts_of(given: Any) -> SequenceOf[Prompt]:
    """Return one prompt or several as a list; ValueError for what is neither."""
    if is_prompt(given):
        return [given]
    rows = len(getattr(given, "shape", ())) > 1
    if not (isinstance(given, SequenceOf) or rows) or isinstance(given, (bytes, bytearray)):
        raise ValueError(f"torch_infini.LLM.generate: prompts must be a list of texts or token ids, got {given!r}")
    return given


def params_of(given: Any, count: int) -> SequenceOf[SamplingParams | None]:
    """Return the settings of `count` prompts, from one for all or one for each; ValueError for anything else."""
    name = "torch_infini.LLM.generate"
    if given is None or isinstance(given, (SamplingParams, str, Mapping)):
        alike: list[Any] = [given] * count  # of another type: refused with the first prompt
        return alike
    if not isinstance(given, SequenceOf):
        raise ValueError(
            f"{name}: params must be SamplingParams, None, or a list of one for each prompt, got {given!r}"
        )
    if len(given) != count:
        raise ValueError(f"{name}: params must be one for all or one for each of {count} prompts, got {len(given)}")
    return given


def is_prompt(prompts: Any) -> bool:
    """Whether it is one prompt rather than several: a text, a mapping, or numbers."""
    if isinstance(prompts, (str, Mapping)):
        return True
    if hasattr(prompts, "shape"):  # torch's or numpy's: ids are its elements, prompts its rows
        return len(prompts.shape) == 1
    if not isinstance(prompts, SequenceOf) or isinstance(prompts, (bytes, bytearray)) or len(prompts) == 0:
        return False
    return hasattr(prompts[0], "__index__") and len(getattr(prompts[0], "shape", ())) == 0


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model folder; None if there is none; ValueError if it cannot be read."""
    is_gguf = folder.is_file()
    if not (has_gguf_tokenizer(folder) if is_gguf else any((folder / name).is_file() for name in _TOKENIZER_FILES)):
        return None
    from transformers import AutoTokenizer

    path, file = (folder.parent, folder.name) if is_gguf else (folder, None)
    options: dict[str, Any] = {"gguf_file": file} if file else {}
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # transformers and tokenizers raise whatever broken files lead to
        if names_code(folder):
            raise ValueError(
                f"torch_infini.LLM: {folder} must hold a tokenizer of transformers' own classes, for code of a model "
                "folder (auto_map) is never run, got one of its own (load it yourself, and pass it as tokenizer=)"
            ) from error
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"torch_infini.LLM: {folder} must hold a readable tokenizer, got: {cause}") from error


def names_code(folder: Path) -> bool:
    """Return whether a model folder has code of its own (auto_map)."""
    for name in ("tokenizer_config.json", "config.json"):
        try:
            if json.loads((folder / name).read_text(encoding="utf-8")).get("auto_map"):
                return True
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
    return False
