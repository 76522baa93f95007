"""transformers' continuous batching, model.generate_batch, of patched models beside transformers' own attention.

    python benchmarks/continuous.py        # results/CPU/continuous.csv

bfloat16, random weights, greedy: 32 requests of unlike lengths, 32 tokens for each. transformers' own is the model as
it was, with each attention that generate_batch takes on the CPU ("paged|eager", "sdpa"); patched is patch_model, packed
the same with weights="packed". The four take turns; ratio is packed's rate over the best of transformers' own.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import Row
from paged_models import ENDS, QUICK, REQUESTS, SHAPES, TOKENS, prompts_of, run_families, seconds

from torch_infini import patch_model
from torch_infini.testing.new_model import new_model
from torch_infini.testing.shapes import LLAMAS

MODELS: dict[str, dict[str, Any]] = {"Llama": LLAMAS["160M"], "Gemma3": SHAPES["Gemma3"], "Granite": SHAPES["Granite"]}
SMALL = {**QUICK, "num_attention_heads": 4, "num_key_value_heads": 1}
OWN = ("paged|eager", "sdpa")


def batching(model: Any, prompts: Sequence[Sequence[int]], attention: str | None) -> Callable[[], object]:
    """A call of generate_batch, with an attention of transformers; None: the model's."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512)

    def run() -> object:
        if attention is not None:
            model.set_attn_implementation(attention)
        with torch.no_grad():
            outputs = model.generate_batch(
                prompts, generation_config=settings, continuous_batching_config=sizes, warmup=False
            )
        numbers = {len(one.generated_tokens) for one in outputs.values()}
        if len(outputs) != len(prompts) or numbers != {TOKENS}:
            raise RuntimeError(f"each of {len(prompts)} requests must have {TOKENS} tokens, got {numbers}")
        return outputs

    return run


def measure(name: str, rounds: int, quick: bool) -> Row:
    sizes = {**MODELS[name], **(SMALL if quick else {}), **ENDS}
    plain, patched, packed = (new_model(name, sizes, seed=0).to(torch.bfloat16) for _ in range(3))
    patch_model(patched)
    patch_model(packed, weights="packed")
    prompts = prompts_of(sizes["vocab_size"])
    calls = {attention: batching(plain, prompts, attention) for attention in OWN}
    calls |= {"patched": batching(patched, prompts, None), "packed": batching(packed, prompts, None)}
    times = seconds(calls, rounds)
    rates = {form: TOKENS * REQUESTS / times[form] for form in calls}
    return {
        "parameters_millions": sum(p.numel() for p in plain.parameters()) / 1e6,
        **{f"{form.replace('|', '_')}_tokens_per_second": rate for form, rate in rates.items()},
        "patched_ratio": rates["patched"] / max(rates[attention] for attention in OWN),
        "ratio": rates["packed"] / max(rates[attention] for attention in OWN),
    }


def main(argv: Sequence[str] | None = None) -> None:
    warnings.filterwarnings("ignore", module="transformers")
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    run_families(argv, __doc__, "continuous.csv", [*MODELS], measure)


if __name__ == "__main__":
    main()
