"""Worker for models of transformers: eager, compiled (compile), compiled with packed weights (packed), patched.

packed is Inductor's freezing: it hands every weight to oneDNN once, which lays it out for its own products. A patched
model has its bfloat16 weights packed too, where that is faster (patch_model(weights="packed")).
"""

from __future__ import annotations

import gc
import inspect
import time
from typing import Any

import protocol
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache, PreTrainedModel, StaticCache

from torch_infini.testing.shapes import weight_bytes


class TorchModels(protocol.Worker):
    def load(self, folder: str, variant: str, dtype: str, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.vocabulary = protocol.vocabulary(folder)
        self.compiled = variant in ("compile", "packed")
        self.caches: dict[tuple[int, ...], Any] = {}
        float_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        kept: Any = {"dtype": float_dtype, "trust_remote_code": False}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **kept).eval()
        self.call = self.model
        version = f"torch {torch.__version__}, transformers {transformers.__version__}"
        if variant == "infini":
            version = f"torch_infini {patch(self.model, dtype)}, {version}"
        elif self.compiled:
            torch._dynamo.config.recompile_limit = 64  # a graph for each length of the static cache
            # Dynamo has to know of freezing before it traces, so that torch.compile's own option comes too late.
            torch._inductor.config.freezing = variant == "packed"
            self.call = torch.compile(self.model, dynamic=False, fullgraph=True)
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        experts = sum(tensor.nbytes for name, tensor in named if ".experts." in name)
        unread = round((1 - protocol.chosen_share(folder)) * experts)
        return {"version": version, "weight_bytes": weight_bytes(self.model) - unread}

    def step(self, call: Any, ids: Tensor, cache: Any) -> Tensor:
        return call(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits

    def ids(self, batch: int, length: int) -> Tensor:
        return torch.tensor(protocol.prompt(batch, length, self.vocabulary))

    def new_cache(self, length: int) -> Any:
        config = self.model.config
        return StaticCache(config=config, max_cache_len=length) if self.compiled else DynamicCache(config=config)

    def cache_of(self, batch: int, context: int, steps: int) -> Any:
        """A cache that holds `context` tokens, filled once by the uncompiled model; later steps are taken off again."""
        key = (batch, context, steps)
        if key not in self.caches:
            cache = self.caches[key] = self.new_cache(context + steps)
            self.step(self.model, self.ids(batch, context), cache)
        cache = self.caches[key]
        if self.compiled:
            for layer in cache.layers:
                layer.cumulative_length.fill_(context)
        elif cache.get_seq_length() > context:
            cache.crop(context - cache.get_seq_length())
        return cache

    def logits(self, tokens: list[int], prompt: int, out: str) -> None:
        ids = torch.tensor([tokens])
        cache = self.new_cache(len(tokens))
        rows = [self.step(self.model, ids[:, :prompt], cache)]
        rows += [self.step(self.call, ids[:, i : i + 1], cache) for i in range(prompt, len(tokens))]
        torch.cat(rows, 1).float().numpy().tofile(out)

    def decode(self, batch: int, context: int, steps: int) -> float:
        cache = self.cache_of(batch, context, steps)
        token = torch.ones(batch, 1, dtype=torch.long)
        start = time.perf_counter()
        for _ in range(steps):
            token = self.step(self.call, token, cache)[:, -1].argmax(-1, keepdim=True)
        return time.perf_counter() - start

    def prefill(self, tokens: int) -> float:
        ids = self.ids(1, tokens)
        if self.compiled:
            if (tokens,) not in self.caches:
                cache = self.caches[tokens,] = self.new_cache(tokens)
                self.step(self.model, ids[:, :1], cache)  # allocates it outside of the compiled graph
            cache = self.caches[tokens,]
            cache.reset()
        else:
            cache = self.new_cache(tokens)
        start = time.perf_counter()
        self.step(self.call, ids, cache)
        return time.perf_counter() - start

    def generate(self, prompt: int, steps: int) -> float:
        ids = self.ids(1, prompt)
        options: dict[str, Any] = {}
        if self.compiled:
            if (prompt, steps) not in self.caches:
                self.caches[prompt, steps] = self.new_cache(prompt + steps)
            cache = self.caches[prompt, steps]
            cache.reset()
            compile_config = CompileConfig(mode="default", fullgraph=True, dynamic=False)
            compile_config._compile_all_devices = True  # or generate() compiles on accelerators only
            options.update(past_key_values=cache, compile_config=compile_config)
        return protocol.seconds_to_generate(self.model, ids, steps, **options)

    def serve(self, prompts: list[list[int]], outputs: list[int]) -> float:
        """One batch, padded on the left, to the longest output: generate() has no other way."""
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
        return protocol.seconds_to_generate(self.model, ids, max(outputs), attention_mask=mask)

    def release(self) -> None:
        self.caches.clear()
        torch._dynamo.reset()
        gc.collect()


def patch(model: PreTrainedModel, dtype: str) -> str:
    """Patch with weights of this dtype; the version of torch_infini."""
    import torch_infini
    from torch_infini.nn.linear import fastest

    if dtype not in ("int8", "int4"):
        packs = dtype == "bfloat16" and fastest("dense", torch.bfloat16, "cpu") == "packed"
        torch_infini.patch_model(model, strict=True, weights="packed" if packs else None)
    elif "weights" in inspect.signature(torch_infini.patch_model).parameters:
        torch_infini.patch_model(model, weights=dtype)
    else:
        raise protocol.Unavailable("not available: patch_model takes no weights yet")
    return torch_infini.__version__


if __name__ == "__main__":
    protocol.serve(TorchModels())
