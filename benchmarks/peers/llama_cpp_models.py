"""Worker for llama.cpp, through the C interface that llama-cpp-python has: BF16, Q8_0, Q4_0 and Q4_K_M."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import gguf_models
import llama_cpp
import protocol


class LlamaCppModels(gguf_models.GgufModels):
    api = llama_cpp.llama_cpp
    version = f"llama-cpp-python {llama_cpp.__version__}"
    prefix = ""
    high_level: llama_cpp.Llama | None = None

    def quantize(self, source: Path, variant: str, path: Path) -> None:
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{variant}")
        status = llama_cpp.llama_model_quantize(bytes(source), bytes(path), ctypes.byref(options))
        if status:
            raise RuntimeError(f"llama_model_quantize returned {status}")

    def clear(self, context: Any) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    def generate(self, prompt: int, steps: int) -> float:
        if self.high_level is None:
            self.high_level = llama_cpp.Llama(
                str(self.path),
                n_ctx=prompt + steps,
                n_threads=self.threads,
                n_threads_batch=self.threads,
                verbose=False,
            )
        (tokens,) = protocol.prompt(1, prompt, self.vocabulary)
        self.high_level.reset()  # or it would keep the prompt of the last call
        start = time.perf_counter()
        source = self.high_level.generate(tokens, temp=0.0)
        for _ in range(steps):
            next(source)
        seconds = time.perf_counter() - start
        source.close()
        return seconds

    def release(self) -> None:
        super().release()
        self.high_level = None


if __name__ == "__main__":
    protocol.serve(LlamaCppModels())
