"""Worker for vLLM's CPU build, by itself ("plain") and with this package's plugin ("plugin"), in one process.

int8 and int4 are compressed-tensors checkpoints, which it writes from the bfloat16 one: int8 with a scale for each row
and activations quantized by row (W8A8), 4 bits in symmetric groups of 128; the head stays in bfloat16.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import protocol
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent.parent
GROUP = 128
SEQUENCES, LENGTH, BATCHED_TOKENS = 32, 2560, 2048  # at once, of one, in a step: BATCHED_TOKENS as llama.cpp's worker
WEIGHT_ARGUMENTS: dict[str, dict[str, Any]] = {
    "int8": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "int4": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
}
FORMATS = {"int8": "int-quantized", "int4": "pack-quantized"}


def quantized(weight: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    """A weight [n, k] as compressed-tensors stores it: tensors by the last part of their names."""
    most = 127 if dtype == "int8" else 7
    groups = weight.float().unflatten(1, (-1, weight.shape[1] if dtype == "int8" else GROUP))
    scales = (groups.abs().amax(-1).clamp(min=1e-8) / most).to(weight.dtype)
    q = (groups / scales.float()[..., None]).round().clamp(-most - 1, most).flatten(1)
    if dtype == "int8":
        return {"weight": q.to(torch.int8), "weight_scale": scales}
    shifts = 4 * torch.arange(8)
    words = ((q.long() + 8).unflatten(1, (-1, 8)) << shifts).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}


def converted(folder: Path, dtype: str) -> Path:
    """The folder of the checkpoint with weights of a dtype, made where there is none."""
    if dtype == "bfloat16":
        return folder
    path = folder / f"compressed-tensors-{dtype}"
    if not path.exists():
        part = path.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for source in folder.glob("*.safetensors"):
            tensors: dict[str, torch.Tensor] = {}
            for name, tensor in load_file(source).items():
                if not name.endswith("_proj.weight"):
                    tensors[name] = tensor
                    continue
                for last, value in quantized(tensor, dtype).items():
                    tensors[name.removesuffix("weight") + last] = value.contiguous()
            save_file(tensors, part / "model.safetensors", {"format": "pt"})
        dynamic = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        group = {
            "targets": ["Linear"],
            "weights": WEIGHT_ARGUMENTS[dtype],
            "input_activations": dynamic if dtype == "int8" else None,
        }
        config = protocol.config_of(folder)
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": FORMATS[dtype],
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }
        (part / "config.json").write_text(json.dumps(config))
        part.rename(path)
    return path


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights that a step reads: of all but the embedding."""
    tensors = {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}
    return sum(x.nbytes for name, x in tensors.items() if "embed_tokens" not in name)


class VllmModels(protocol.Worker):
    def load(self, folder: str, variant: str, dtype: str, threads: int) -> dict[str, Any]:
        path = converted(Path(folder), dtype)
        os.environ |= {
            "TORCH_INFINI_VLLM": "1" if variant == "plugin" else "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default leaves a core out
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, so that its steps can be timed
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(Path(folder).parent.parent / "vllm_cache"),
        }
        version = ""
        if variant == "plugin":
            sys.path.append(str(ROOT))  # vLLM's environment does not have the package
            import torch_infini_autoload

            torch_infini_autoload.load_in_vllm()
            import torch_infini

            version = f", torch_infini {torch_infini.__version__}"
        import vllm

        self.vocabulary = protocol.vocabulary(folder)
        torch.set_num_threads(threads)
        self.llm = vllm.LLM(
            str(path),
            dtype="bfloat16",
            max_model_len=LENGTH,
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=BATCHED_TOKENS,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            max_logprobs=-1,
            logprobs_mode="raw_logits",
        )
        return {"version": f"vllm-cpu {vllm.__version__}{version}", "weight_bytes": weight_bytes(path)}

    def params(self, tokens: int, **fields: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=tokens, **fields)

    def logits(self, tokens: list[int], prompt: int, out: str) -> None:
        # It takes no tokens behind a prompt from outside: each row is that of a prompt.
        rows = np.zeros((len(tokens) - prompt + 1, self.vocabulary), np.float32)
        for row, length in enumerate(range(prompt, len(tokens) + 1)):
            one = {"prompt_token_ids": tokens[:length]}
            (output,) = self.llm.generate([one], self.params(1, logprobs=-1), use_tqdm=False)
            for token, entry in output.outputs[0].logprobs[0].items():
                rows[row, token] = entry.logprob  # a logit, by logprobs_mode
        rows.tofile(out)

    def started(self, batch: int, context: int, tokens: int) -> Any:
        """The engine with so many requests, each of which has its first token."""
        engine = self.llm.llm_engine
        for i, prompt in enumerate(protocol.prompt(batch, context, self.vocabulary)):
            engine.add_request(f"{time.perf_counter_ns()}-{i}", {"prompt_token_ids": prompt}, self.params(tokens))
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
        return engine

    def decode(self, batch: int, context: int, steps: int) -> float:
        engine = self.started(batch, context, steps + 1)
        start = time.perf_counter()
        finished = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished += 1
                    if (made := len(output.outputs[0].token_ids)) != steps + 1:
                        raise RuntimeError(f"{steps} steps made {made - 1} tokens")
        seconds = time.perf_counter() - start
        if finished != batch:
            raise RuntimeError(f"{finished} of {batch} sequences ended")
        return seconds

    def timed(self, prompts: list[list[int]], outputs: list[int]) -> float:
        """Of generate() for these prompts, with exactly so many tokens for each."""
        params = [self.params(tokens) for tokens in outputs]
        start = time.perf_counter()
        results = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = [len(result.outputs[0].token_ids) for result in results]
        if made != outputs:
            raise RuntimeError(f"generate made {made} tokens instead of {outputs}")
        return seconds

    def prefill(self, tokens: int) -> float:
        return self.timed(protocol.prompt(1, tokens, self.vocabulary), [1])

    def generate(self, prompt: int, steps: int) -> float:
        return self.timed(protocol.prompt(1, prompt, self.vocabulary), [steps])

    def serve(self, prompts: list[list[int]], outputs: list[int]) -> float:
        return self.timed(prompts, outputs)

    def release(self) -> None:
        gc.collect()


if __name__ == "__main__":
    protocol.serve(VllmModels())
