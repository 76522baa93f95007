"""What int8 keys and values cost and bring: the error of logits, and the time of decode attention over long contexts.

    python benchmarks/kv_cache.py --error MODEL [--error MODEL ...]      # results/CPU/kv-cache-error.csv
    python benchmarks/kv_cache.py --speed [--threads 1,2]                # results/CPU/kv-cache-speed.csv

MODEL is a folder, "demo" for the demo's trained model, or a shape of random weights ("160M", "1.1B"). Each runs in
float32 and in bfloat16, with caches of that dtype and of int8: of windows of tokens three quarters are a prompt, the
rest is decoded one by one. All are held against the model in float32 with a cache of float32. The demo reads text that
it was trained on, others random tokens, over which a perplexity says nothing.

logits_rms: the root of the mean squared error over that of the logits in float32. agreement: how often the likeliest
next token is the same. rms_of_cache and agreement_of_cache: the same against the model with a cache of its own dtype.
share: of the bandwidth that the sum of a large vector reaches.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from pathlib import Path

import harness
import torch
from harness import MODELS, RESULTS, Cases, Row, dtype_name
from op_cases import Case, Sample, info_of, paged_inputs, quantize_caches
from torch import Tensor

from torch_infini._core.bandwidth import read_bandwidth
from torch_infini._core.memory import allocate
from torch_infini.demo import MODEL
from torch_infini.engine.loading import load_tokenizer
from torch_infini.models import Llama
from torch_infini.nn import Batch
from torch_infini.testing.benchmark import medians
from torch_infini.testing.shapes import LLAMAS, saved_shape

BLOCK = 32
PREFILL = 0.75  # of a window; the rest is decoded token by token
# Decode: sequences, keys of each, query heads, key heads; heads of 128 columns.
CONTEXTS = (
    (8, 2048, 32, 8),
    (4, 8192, 32, 8),
    (1, 32768, 32, 8),
    (8, 2048, 16, 8),
    (8, 2048, 8, 8),
)


def folder_of(name: str) -> Path:
    """Where the model lies; one of random weights is made first."""
    if name == "demo":
        return Path(MODEL)
    return saved_shape(name, MODELS / "models") if name in LLAMAS else Path(name)


def windows_of(name: str, model: Llama, count: int, length: int) -> Tensor:
    """[count, length] tokens."""
    if name == "demo":
        from train_demo import split_topics

        tokenizer = load_tokenizer(folder_of(name))
        assert tokenizer is not None
        ids = [token for text in split_topics(0)[0] for token in tokenizer(text).input_ids]
        return torch.tensor(ids[: count * length]).view(-1, length)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (count, length), generator=generator)


@torch.inference_mode()
def logits_of(model: Llama, window: Tensor, cache_dtype: torch.dtype | None) -> Tensor:
    """[tokens, vocabulary] in float32: the window's first part as a prompt, the rest token by token."""
    n = len(window)
    blocks = -(-n // BLOCK)
    cache = model.new_cache(blocks, BLOCK, cache_dtype)
    at, tables = torch.arange(n), torch.arange(blocks)[None]
    prompt = int(n * PREFILL)
    logits = []
    for first, end in [(0, prompt), *((i, i + 1) for i in range(prompt, n))]:
        part = slice(first, end)
        starts = torch.tensor([0, end - first])
        logits.append(model(Batch(window[part], at[part], at[part], tables, torch.tensor([end]), starts), cache))
    return torch.cat(logits).float()


def rms(a: Tensor, b: Tensor) -> float:
    """The error of a relative to b."""
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


def agreement(a: Tensor, b: Tensor) -> float:
    return float((a.argmax(-1) == b.argmax(-1)).float().mean())


def perplexity(logits: Tensor, windows: Tensor) -> float:
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    return math.exp(loss)


def errors_of(name: str, count: int, length: int) -> list[Row]:
    folder = folder_of(name)
    exact = Llama.from_pretrained(folder, dtype="float32", progress=False)
    windows = windows_of(name, exact, count, length)

    def all_logits(model: Llama, cache_dtype: torch.dtype | None) -> Tensor:
        return torch.stack([logits_of(model, window, cache_dtype) for window in windows])

    want = all_logits(exact, None)
    rows = []
    for dtype in ("float32", "bfloat16"):
        model = exact if dtype == "float32" else Llama.from_pretrained(folder, dtype=dtype, progress=False)
        floats = want if dtype == "float32" else all_logits(model, None)
        for cache, got in ((dtype, floats), ("int8", all_logits(model, torch.int8))):
            row: Row = {"dtype": dtype, "cache": cache, "tokens": windows.numel()}
            row |= {"logits_rms": rms(got, want), "agreement": agreement(got, want)}
            row["perplexity"] = perplexity(got, windows) if name == "demo" else None
            row |= {"rms_of_cache": rms(got, floats), "agreement_of_cache": agreement(got, floats)}
            a_block = model.new_cache(1, BLOCK, torch.int8 if cache == "int8" else None)
            rows.append({**row, "cache_bytes_per_token": a_block.bytes_per_token})
    return rows


def in_large_pages(tensor: Tensor) -> Tensor:
    """A copy where KVCache has its tensors."""
    return allocate(*tensor.shape, dtype=tensor.dtype).copy_(tensor)


def speed_of(context: tuple[int, int, int, int], dtype: torch.dtype, rounds: int) -> Row:
    sequences, keys, heads, kv_heads = context
    args = paged_inputs(dtype, [keys] * sequences, heads, kv_heads, 128, BLOCK)
    of_int8, scales = quantize_caches(args)
    paged = lambda args: (args[0], in_large_pages(args[1]), in_large_pages(args[2]), *args[3:])
    scales = {name: in_large_pages(values) for name, values in scales.items()}
    info = info_of("paged_attention")
    cases = {"floats": Case(info, Sample("", paged(args))), "int8": Case(info, Sample("", paged(of_int8), scales))}
    bandwidth = read_bandwidth()
    times = medians({name: case.functional for name, case in cases.items()}, rounds)
    shares = {name: case.cost.bytes / times[name] / bandwidth for name, case in cases.items()}
    return {
        "ms": 1e3 * times["floats"],
        "int8_ms": 1e3 * times["int8"],
        "share": shares["floats"],
        "int8_share": shares["int8"],
        "speedup": times["floats"] / times["int8"],
    }


def speeds(options: argparse.Namespace) -> Cases:
    for threads in options.threads:
        for dtype in (torch.bfloat16,) if options.quick else (torch.bfloat16, torch.float32):
            for context in [(2, 64, 8, 2)] if options.quick else CONTEXTS:
                key = dict(zip(("sequences", "keys", "heads", "kv_heads"), context, strict=True))
                case = {**key, "dtype": dtype_name(dtype), "threads": threads}
                yield case, partial(speed_of, context, dtype, options.rounds)


def main() -> None:
    parser = harness.new_parser(__doc__, "", threads=[1], rounds=15, quick="one short context in bfloat16")
    parser.set_defaults(out=RESULTS)
    parser.add_argument("--error", action="append", default=[], metavar="MODEL", help='a folder, "demo", or a shape')
    parser.add_argument("--windows", type=harness.count, default=16, help="windows of tokens (default: 16)")
    parser.add_argument("--tokens", type=harness.count, default=256, help="of a window (default: 256)")
    parser.add_argument("--speed", action="store_true", help="time decode attention")
    options = parser.parse_args()
    if not options.error and not options.speed:
        parser.error("nothing to do: --error MODEL, --speed or both")
    if options.error:
        models = (
            ({"model": name}, partial(errors_of, name, options.windows, options.tokens)) for name in options.error
        )
        harness.run(options, models, options.out / "kv-cache-error.csv")
    if options.speed:
        harness.run(options, speeds(options), options.out / "kv-cache-speed.csv")


if __name__ == "__main__":
    main()
