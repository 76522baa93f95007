"""Worker for ik_llama.cpp, the fork of llama.cpp, through the C interface of ik-llama-cpp-python: BF16, Q8_0, Q4_0,
Q4_K_M, IQ4_K and IQ4_KS, with weights repacked at load (--run-time-repack), as its users have them on a CPU.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf_models
import ik_llama_cpp
import protocol
from ik_llama_cpp import _ctypes_api


class IkLlamaCppModels(gguf_models.GgufModels):
    api = _ctypes_api
    version = f"ik-llama-cpp-python {ik_llama_cpp.__version__}"
    prefix = "ik-"

    def quantize(self, source: Path, variant: str, path: Path) -> None:
        ik_llama_cpp.quantize(source, path, variant)

    def model_options(self) -> Any:
        options = super().model_options()
        options.repack_tensors = True
        options.use_mmap = False  # repacking is in place
        return options

    def clear(self, context: Any) -> None:
        _ctypes_api.llama_kv_cache_clear(context)

    def generate(self, prompt: int, steps: int) -> float:
        """As in the other worker's decode(): generate() of the package looks for the best token in a loop of Python
        over the vocabulary, and cannot be told to repack."""
        (tokens,) = protocol.prompt(1, prompt, self.vocabulary)
        context = self.context(1, prompt + steps)
        start = time.perf_counter()
        for position in range(prompt, prompt + steps):
            with self.batch([(0, position - len(tokens), tokens)]) as batch:
                self.run(context, batch)
            tokens = [int(self.row(context, -1).argmax())]
        return time.perf_counter() - start


if __name__ == "__main__":
    protocol.serve(IkLlamaCppModels())
