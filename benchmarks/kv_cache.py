"""What int8 keys and values cost and bring: the error of logits, and the time of decode attention over long contexts.

    python benchmarks/kv_cache.py --error MODEL [--error MODEL ...]
    python benchmarks/kv_cache.py --speed [--threads 1,2]

MODEL is a folder, "demo" for the demo's trained model, or a shape of random weights ("160M", "1.1B"). Each runs in
float32 and in bfloat16, with caches of that dtype and of int8: of windows of tokens three quarters are a prompt, the
rest is decoded one by one. All are held against the model in float32 with a cache of float32. The demo reads text that
it was trained on, others random tokens, over which a perplexity says nothing.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torch_infini import _memory
from torch_infini._bandwidth import read_bandwidth
from torch_infini.demo import MODEL
from torch_infini.engine.llm import load_tokenizer
from torch_infini.models import Llama
from torch_infini.nn import Batch
from torch_infini.ops.paged_attention import cost, inputs, quantised
from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import counts, medians, results_of, write_csv
from torch_infini.testing.llama import SHAPES, random_llama

RESULTS = results_of(__file__)
FOLDER = Path(__file__).parents[1] / "build" / "peers"
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


@dataclass
class ErrorRow:
    """One line of the CSV. logits_rms: the root of the mean squared error over that of the logits in float32.
    agreement: how often the likeliest next token is the same. rms_of_cache and agreement_of_cache: the same against
    the model with a cache of its own dtype. perplexity: of the demo alone."""

    model: str
    dtype: str
    cache: str
    tokens: int
    logits_rms: float
    agreement: float
    perplexity: float | None
    rms_of_cache: float
    agreement_of_cache: float
    cache_bytes_per_token: int


@dataclass
class SpeedRow:
    """One line of the CSV; share: of the bandwidth that a dot product of two large vectors reaches."""

    sequences: int
    keys: int
    heads: int
    kv_heads: int
    dtype: str
    threads: int
    ms: float
    int8_ms: float
    share: float
    int8_share: float
    speedup: float


def folder_of(name: str) -> Path:
    """Where the model lies; one of random weights is made first."""
    if name == "demo":
        return Path(MODEL)
    if name not in SHAPES:
        return Path(name)
    folder = FOLDER / name
    if not (folder / "config.json").is_file():
        random_llama(name).save_pretrained(folder)
    return folder


def windows_of(name: str, model: Llama, count: int, length: int) -> Tensor:
    """[count, length] tokens."""
    if name == "demo":
        from torch_infini.demo.train import split_topics

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


def errors_of(name: str, count: int, length: int) -> list[ErrorRow]:
    folder = folder_of(name)
    exact = Llama.from_pretrained(folder, dtype="float32", progress=False)
    windows = windows_of(name, exact, count, length)
    all_logits = lambda model, dtype: torch.stack([logits_of(model, window, dtype) for window in windows])
    want = all_logits(exact, None)
    rows = []
    for dtype in ("float32", "bfloat16"):
        model = exact if dtype == "float32" else Llama.from_pretrained(folder, dtype=dtype, progress=False)
        floats = want if dtype == "float32" else all_logits(model, None)
        for cache, got in ((dtype, floats), ("int8", all_logits(model, torch.int8))):
            text = perplexity(got, windows) if name == "demo" else None
            against = rms(got, want), agreement(got, want), text, rms(got, floats), agreement(got, floats)
            token = model.new_cache(1, BLOCK, torch.int8 if cache == "int8" else None).bytes_per_token
            rows.append(ErrorRow(name, dtype, cache, windows.numel(), *against, token))
            print(rows[-1])
    return rows


def in_large_pages(tensor: Tensor) -> Tensor:
    """A copy where KVCache has its tensors."""
    return _memory.new(*tensor.shape, dtype=tensor.dtype).copy_(tensor)


def speed_of(context: tuple[int, int, int, int], dtype: torch.dtype, threads: int, rounds: int) -> SpeedRow:
    sequences, keys, heads, kv_heads = context
    args = inputs(dtype, [keys] * sequences, heads, kv_heads, 128, BLOCK)
    of_int8, scales = quantised(args)
    paged = lambda args: (args[0], in_large_pages(args[1]), in_large_pages(args[2]), *args[3:])
    args, of_int8 = paged(args), paged(of_int8)
    scales = {name: in_large_pages(values) for name, values in scales.items()}
    op = torch.ops.infini.paged_attention.default
    with threads_set_to(threads):
        bandwidth = read_bandwidth()
        times = medians({"floats": lambda: op(*args), "int8": lambda: op(*of_int8, **scales)}, rounds)
    read = cost(*args).bytes, cost(*of_int8, **scales).bytes
    floats, int8 = times["floats"], times["int8"]
    shares = read[0] / floats / bandwidth, read[1] / int8 / bandwidth
    row = SpeedRow(*context, str(dtype)[6:], threads, 1e3 * floats, 1e3 * int8, *shares, floats / int8)
    print(row)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--error", action="append", default=[], metavar="MODEL", help='a folder, "demo", or a shape')
    parser.add_argument("--windows", type=int, default=16, metavar="N", help="windows of tokens (default: 16)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of a window (default: 256)")
    parser.add_argument("--speed", action="store_true", help="time decode attention")
    parser.add_argument("--threads", type=counts, default=[1], help="numbers of threads (default: 1)")
    parser.add_argument("--rounds", type=int, default=15, help="a time is the median of so many (default: 15)")
    parser.add_argument("--quick", action="store_true", help="one short context in bfloat16")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of kv-cache-error.csv and kv-cache-speed.csv")
    options = parser.parse_args()
    if not options.error and not options.speed:
        parser.error("nothing to do: --error MODEL, --speed or both")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.error:
        rows = [row for name in options.error for row in errors_of(name, options.windows, options.tokens)]
        write_csv(options.out / "kv-cache-error.csv", rows, ErrorRow)
    if options.speed:
        contexts = [(2, 64, 8, 2)] if options.quick else CONTEXTS
        dtypes = [torch.bfloat16] if options.quick else [torch.bfloat16, torch.float32]
        rows = [
            speed_of(context, dtype, threads, options.rounds)
            for threads in options.threads
            for dtype in dtypes
            for context in contexts
        ]
        write_csv(options.out / "kv-cache-speed.csv", rows, SpeedRow)
    return 0


if __name__ == "__main__":
    sys.exit(main())
