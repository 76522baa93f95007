"""LLM in InfiniLM's form: a folder in, lists of RequestOutput out; and other names that scripts import from here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from ....engine import Metrics
from ....engine.chat import Message
from ....engine.llm import prompts_of
from ....engine.prompts import Prompt
from .async_engine import AsyncLLMEngine
from .config import EngineConfig
from .engine import LLMEngine
from .request import InferenceRequest, RequestOutput, TokenOutput
from .sampling_params import SamplingParams, resolved

__all__ = [
    "LLM",
    "AsyncLLMEngine",
    "EngineConfig",
    "InferenceRequest",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "TokenOutput",
]


class LLM:
    """A model that continues prompts, many at a time.

    Args:
        model_path, device, dtype, tensor_parallel_size, max_batch_size, max_tokens, num_blocks, block_size,
            temperature, top_p, top_k, cache_type, max_cache_len, enable_graph: Fields of EngineConfig, which documents
            them. A GPU given as device must exist; without the argument a machine without a GPU uses its CPU.
        **settings: Further arguments of torch_infini.LLM, such as weights="int8".

    Attributes:
        config: EngineConfig.
        engine: The LLMEngine; engine.llm is the torch_infini.LLM.

    Raises:
        FileNotFoundError: For a folder or file that does not exist.
        ValueError: For an unsupported config, checkpoint or setting.
        MemoryError: For a cache that does not fit into memory.

    Example:
        >>> llm = LLM("path/to/model", num_blocks=512)
        >>> for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        >>>     print(output.prompt, output.outputs[0].text)
    """

    def __init__(
        self,
        model_path: Any,
        device: Any = EngineConfig.device,
        dtype: Any = EngineConfig.dtype,
        tensor_parallel_size: int = EngineConfig.tensor_parallel_size,
        max_batch_size: int = EngineConfig.max_batch_size,
        max_tokens: int = EngineConfig.max_tokens,
        num_blocks: int = EngineConfig.num_blocks,
        block_size: int = EngineConfig.block_size,
        temperature: float = EngineConfig.temperature,
        top_p: float = EngineConfig.top_p,
        top_k: int = EngineConfig.top_k,
        cache_type: str = EngineConfig.cache_type,
        max_cache_len: int = EngineConfig.max_cache_len,
        enable_graph: bool = EngineConfig.enable_graph,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig(
            model_path,
            device,
            dtype,
            tensor_parallel_size,
            max_batch_size=max_batch_size,
            max_tokens=max_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            cache_type=cache_type,
            max_cache_len=max_cache_len,
            enable_graph=enable_graph,
            settings=settings,
        )
        self.engine = LLMEngine(self.config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts, as many at a time as fit into the engine.

        Args:
            prompts: A text or token ids, also as {"prompt": text} or {"prompt_token_ids": ids}, or several of them.
            sampling_params: For all prompts, or one per prompt; None: the config's.
            use_tqdm: Whether to show a tqdm bar of finished prompts on stderr, if tqdm is installed and stderr is a
                terminal.

        Returns:
            One output per prompt, in their order. A failed one has finish_reason ERROR.

        Raises:
            ValueError: For an invalid prompt or settings; nothing is computed then.
        """
        rows = prompts_of(prompts)
        default = self.config.default_params()
        if isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str):
            outputs = self.engine.llm.iterate(rows, [resolved(params, default) for params in sampling_params])
        else:
            outputs = self.engine.llm.iterate(rows, resolved(sampling_params, default))
        shown: Any = outputs
        if use_tqdm and sys.stderr.isatty():
            with suppress(ImportError):
                shown = import_module("tqdm").tqdm(outputs, "prompts", len(rows))
        return [RequestOutput.of(output) for output in shown]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], or several such lists.
            sampling_params, use_tqdm: As in generate.

        Returns:
            As generate.

        Raises:
            ValueError: If the tokenizer has no chat template; otherwise as generate.
        """
        return self.generate(self.engine.llm.chat_prompts(messages), sampling_params, use_tqdm)

    def metrics(self) -> Metrics:
        """The engine's Metrics."""
        return self.engine.metrics()
