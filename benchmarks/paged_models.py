"""Models of transformers in the engine, beside transformers' own generate: one request, and 32 of unlike lengths.

    python benchmarks/paged_models.py        # results/CPU/paged_models.csv

bfloat16, random weights, greedy, 32 tokens a request. transformers gets the 32 requests as one padded batch. The model
is patched by LLM; `patched` is its own generate after that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import harness
import torch
from harness import Row

from torch_infini import LLM, SamplingParams, patched
from torch_infini.testing.new_model import new_model

TOKENS, REQUESTS, LONGEST = 32, 32, 128
ENDS = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "vocab_size": 65536,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
    },
    "Granite": {
        "vocab_size": 49152,
        "hidden_size": 1024,
        "intermediate_size": 2560,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "Mixtral": {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
QUICK = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}


def prompts_of(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, LONGEST, (REQUESTS,), generator=generator).tolist()
    return [torch.randint(5, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def generating(model: Any, prompts: Sequence[Sequence[int]]) -> Callable[[], object]:
    """transformers' generate for prompts as one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])

    def run() -> object:
        with torch.no_grad():
            return model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)

    return run


def seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Medians of rounds in turns, after one call of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


def measure(name: str, rounds: int, quick: bool) -> Row:
    torch.manual_seed(0)
    sizes = SHAPES[name] | (QUICK if quick else {}) | ENDS
    head = {"head_dim": sizes["head_dim"]} if "head_dim" in SHAPES[name] else {}
    sizes = {key: value for key, value in sizes.items() if key != "head_dim"} | head
    plain, served = (new_model(name, sizes, seed=0).to(torch.bfloat16) for _ in range(2))
    prompts = prompts_of(sizes["vocab_size"])
    llm = LLM(served, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    with patched(plain):
        pass  # what patch_model imports is not timed
    one = {"transformers": generating(plain, prompts[:1]), "patched": generating(served, prompts[:1])}
    one["engine"] = lambda: llm.generate(prompts[:1], params)
    many = {"transformers": generating(plain, prompts), "engine": lambda: llm.generate(prompts, params)}
    alone, together = seconds(one, rounds), seconds(many, rounds)
    return {
        "parameters_millions": sum(p.numel() for p in plain.parameters()) / 1e6,
        "recorded": llm.engine.model.is_recordable,
        **{f"{form}_tokens_per_second": TOKENS / alone[form] for form in one},
        "ratio": alone["transformers"] / alone["engine"],
        **{f"{form}_tokens_per_second_32": TOKENS * REQUESTS / together[form] for form in many},
        "ratio_32": together["transformers"] / together["engine"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    run_families(argv, __doc__, "paged_models.csv", [*SHAPES], measure)


def run_families(
    argv: Sequence[str] | None,
    doc: str | None,
    out: str,
    known: Sequence[str],
    measure: Callable[[str, int, bool], Row],
) -> None:
    """A script's main: its options, and measure(family, rounds, quick) of each family that they choose."""
    parser = harness.new_parser(doc, out, rounds=3, quick="a tiny shape and one round")
    names = harness.names("family", known)
    parser.add_argument("--families", type=names, default=[*known], metavar="A,B", help="default: all")
    options = parser.parse_args(argv)
    rounds = 1 if options.quick else options.rounds
    cases = (
        ({"family": name, "threads": torch.get_num_threads()}, partial(measure, name, rounds, options.quick))
        for name in options.families
    )
    harness.run(options, cases)


if __name__ == "__main__":
    main()
