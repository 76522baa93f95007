"""Worker for this project's own models in its own engine: torch_infini.LLM, with dense, int8 and int4 weights; in the
variant "ranks" shared by as many processes as there are threads, in others with the GGUF file of that name.

Settings are those that LLM has by itself, but for the cache's size and the reuse of prefixes: off, but for prefix().
"""

from __future__ import annotations

import gc
import mmap
import random
import time
from pathlib import Path
from typing import Any

import protocol
import torch

import torch_infini
from torch_infini import LLM, SamplingParams
from torch_infini.distributed import init_tp_group
from torch_infini.engine.runner import ChunkInput, make_worker
from torch_infini.models import Llama
from torch_infini.nn import Linear

BLOCK = 32
GGUF = ("Q8_0", "Q4_0", "Q4_K_M", "MXFP4_MOE")
SUFFIX = 32  # tokens of a request behind its prefix


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams.greedy(max_tokens=tokens, ignore_eos=True)


class EngineModels(protocol.Worker):
    def load(self, folder: str, variant: str, dtype: str, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.vocabulary = protocol.vocabulary(folder)
        self.folder = Path(folder)
        self.weights: Any = {"bfloat16": "dense"}.get(dtype, dtype)
        tp_group = init_tp_group(threads) if variant == "ranks" else None
        self.llms: dict[tuple[Any, ...], LLM] = {}
        self.random = random.Random(0)
        version = f"torch_infini {torch_infini.__version__}, torch {torch.__version__}"
        is_file = variant in GGUF
        if is_file and not (self.folder / f"{variant}.gguf").is_file():
            raise RuntimeError(f"{variant}.gguf is not there: it is written where llama.cpp takes part")
        if protocol.config_of(folder)["model_type"] != "llama":
            source = self.folder / f"{variant}.gguf" if is_file else self.folder
            quantization = None if is_file or self.weights == "dense" else self.weights
            self.model: Any = LLM(source, quantization=quantization, progress=False, cache_blocks=1).engine.model
            inner = self.model.model
            named = [*inner.named_parameters(), *inner.named_buffers()]
            experts = sum(tensor.nbytes for name, tensor in named if ".experts." in name)
            unread = round((1 - protocol.chosen_share(folder)) * experts)
            return {"version": version, "weight_bytes": self.model.bytes_per_step - unread}
        if tp_group is not None and tp_group.workers is not None:
            tp_group.workers.make(make_worker, folder, self.weights, None, "cpu")
        source, weights = (self.folder / f"{variant}.gguf", "dense") if is_file else (self.folder, self.weights)
        self.model = Llama.from_pretrained(source, weights, dtype=torch.bfloat16, progress=False, tp_group=tp_group)
        ranks = 1 if tp_group is None else threads
        linear = [module for module in self.model.modules() if isinstance(module, Linear)]
        return {
            "version": version,
            "weight_bytes": self.model.bytes_per_step * ranks,
            "linear_bytes": sum(p.nbytes for layer in linear for p in layer.parameters()) * ranks,
        }

    def llm(self, sequences: int, length: int, **settings: Any) -> LLM:
        """An engine for so many sequences of so many tokens; made once."""
        key = (sequences, length, *settings.items())
        if key not in self.llms:
            # A block to spare for each, which the scheduler wants before it takes one more in.
            blocks = sequences * (-(-length // BLOCK) + 1)
            settings = {"enable_prefix_caching": False, "block_size": BLOCK, "cache_blocks": blocks} | settings
            self.llms[key] = LLM(self.model, max_num_seqs=sequences, max_model_len=length, **settings)
        return self.llms[key]

    def logits(self, tokens: list[int], prompt: int, out: str) -> None:
        blocks = -(-len(tokens) // BLOCK)
        runner = self.llm(1, len(tokens)).engine._runner
        parts = [(0, prompt), *((i, i + 1) for i in range(prompt, len(tokens)))]
        rows = [runner.run([ChunkInput(tokens[a:b], a, list(range(blocks)))]).clone() for a, b in parts]
        torch.cat(rows).float().numpy().tofile(out)

    def decode(self, batch: int, context: int, steps: int) -> float:
        # All prompts begin in the first step, so that all have their context, and end, at the same time.
        engine = self.llm(batch, context + steps + 1, max_num_batched_tokens=batch * context).engine
        for prompt in protocol.prompt(batch, context, self.vocabulary):
            engine.add(prompt, greedy(steps + 1))
        generated = engine.metrics().generated_tokens
        while engine.metrics().generated_tokens == generated:
            engine.step()
        start = time.perf_counter()
        for _ in range(steps):
            engine.step()
        seconds = time.perf_counter() - start
        made = engine.metrics().generated_tokens - generated
        if not engine.is_idle or made != batch * (steps + 1):
            raise RuntimeError(f"{steps} steps of {batch} sequences made {made - batch} tokens")
        return seconds

    def prefill(self, tokens: int) -> float:
        engine = self.llm(1, tokens + 1).engine
        engine.add(protocol.prompt(1, tokens, self.vocabulary)[0], greedy(1))
        start = time.perf_counter()
        while not engine.is_idle:
            engine.step()
        return time.perf_counter() - start

    def timed(self, llm: LLM, prompts: list[list[int]], outputs: list[int]) -> float:
        """Of generate() for these prompts, with exactly so many tokens for each."""
        params = [greedy(tokens) for tokens in outputs]
        start = time.perf_counter()
        results = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        made = [len(result.token_ids) for result in results]
        if made != outputs:
            raise RuntimeError(f"generate made {made} tokens instead of {outputs}")
        return seconds

    def generate(self, prompt: int, steps: int) -> float:
        llm = self.llm(1, prompt + steps)
        return self.timed(llm, protocol.prompt(1, prompt, self.vocabulary), [steps])

    def serve(self, prompts: list[list[int]], outputs: list[int]) -> float:
        llm = self.llm(len(prompts), protocol.longest(prompts, outputs))
        return self.timed(llm, prompts, outputs)

    def prefix(self, tokens: int) -> dict[str, float]:
        llm = self.llm(1, 2 * (tokens + SUFFIX), enable_prefix_caching=True)
        text = lambda length: [self.random.randrange(self.vocabulary) for _ in range(length)]
        known = text(tokens)
        self.timed(llm, [known + text(SUFFIX)], [1])
        return {
            "other prefix": self.timed(llm, [text(tokens) + text(SUFFIX)], [1]),
            "same prefix": self.timed(llm, [known + text(SUFFIX)], [1]),
        }

    def read(self) -> dict[str, float]:
        # A virtual machine may hand free memory back to its host and wait for it when it is wanted again, seconds for a
        # gigabyte, whoever reads and in pages of whatever size. So as much is fetched first, and each takes what the
        # one before it has left.
        self.plain_read(large_pages=True)
        large = self.plain_read(large_pages=True)
        start = time.perf_counter()
        llm = LLM(self.folder, quantization=self.weights, progress=False, cache_blocks=1)
        seconds = time.perf_counter() - start
        del llm
        gc.collect()
        return {"": seconds, "plain read": self.plain_read(), "plain read, large pages": large}

    def plain_read(self, large_pages: bool = False) -> float:
        """Seconds to read the files into pages that nobody has touched, as those of a new model are, by one thread."""
        start = time.perf_counter()
        memories = []
        for path in sorted(self.folder.glob("*.safetensors")):
            size = path.stat().st_size
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            memories.append(memory)
            with path.open("rb", buffering=0) as file, memoryview(memory) as view:
                done = 0
                while count := file.readinto(view[done:]):  # type: ignore[attr-defined]
                    done += count
        seconds = time.perf_counter() - start
        for memory in memories:
            memory.close()
        return seconds

    def release(self) -> None:
        self.llms.clear()
        gc.collect()


if __name__ == "__main__":
    protocol.serve(EngineModels())
