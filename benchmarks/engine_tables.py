"""The tables of docs/engine.md, docs/distributed.md and docs/scale-out.md, as Markdown, from the CSV files of one CPU.

`make docs` puts them into the pages; table.py has those of the other pages.
"""

from __future__ import annotations

from collections.abc import Iterator

from harness import read_csv
from table import PAGES, RESULTS

WEIGHTS = {"bfloat16": "bf16", "dense": "bf16"}
CASES = {
    "generate": "generate 32 tokens",
    "decode-16": "decode",
    "prefill-512": "prompt of 512",
    "serve-32": "32 requests",
}
COLUMNS = {  # how a CSV names an engine: how the tables do
    "engine": "engine",
    "infini": "patched model",
    "eager": "transformers",
    "llama.cpp": "llama.cpp",
    "OpenVINO": "OpenVINO",
}


def read(name: str) -> list[dict[str, str]]:
    """The rows of a file of the CPU that the pages quote."""
    return read_csv(RESULTS / PAGES / name)


def by_engine(name: str) -> Iterator[str]:
    """Tokens a second of every engine; the ratio is the engine's to the best other one, patched models left out."""
    rows = read(name)
    columns = {key: label for key, label in COLUMNS.items() if any(row["engine"].startswith(key) for row in rows)}
    has_limit = any(row["share_of_limit"] for row in rows)
    labels = [*columns.values(), "engine to the best other", *(["engine: of the bandwidth limit"] if has_limit else [])]
    yield f"| case, weights, threads | {' | '.join(labels)} |"
    yield f"| --- |{' ---: |' * len(labels)}"
    keys = ("cell", "dtype", "threads")
    order = {key: i for i, key in enumerate(("bfloat16", "int8", "int4"))}
    for key in sorted({tuple(row[k] for k in keys) for row in rows}, key=lambda key: (key[0], key[2], order[key[1]])):
        of_cell = [row for row in rows if tuple(row[k] for k in keys) == key]
        rates = {row["engine"]: float(row["tokens_per_s"]) for row in of_cell}
        best = max(rate for engine, rate in rates.items() if engine not in ("engine", "infini"))
        share = next(row["share_of_limit"] for row in of_cell if row["engine"] == "engine")
        cells = []
        for column in columns:
            found = [(e.removeprefix(column).strip(), rate) for e, rate in rates.items() if e.startswith(column)]
            cells.append(", ".join(f"{variant} {rate:.1f}".strip() for variant, rate in found) or "-")
        cells.append(f"{rates['engine'] / best:.2f}x")
        if has_limit:
            cells.append(f"{float(share):.0%}" if share else "-")
        cell, dtype, threads = key
        yield f"| {CASES[cell]}, {WEIGHTS.get(dtype, dtype)}, {threads} | {' | '.join(cells)} |"


def engine_160M_table() -> Iterator[str]:
    """One stream of the 160M shape."""
    yield from by_engine("engine-160M.csv")


def engine_1B_table() -> Iterator[str]:
    """One stream of the 1.1B shape."""
    yield from by_engine("engine-1.1B.csv")


def serve_table() -> Iterator[str]:
    """32 requests at once."""
    yield from by_engine("serve.csv")


def packed_table() -> Iterator[str]:
    """Products of a decoder layer by the number of rows."""
    yield (
        "| rows | one thread, ms | `linear` takes | torch takes | of the limit "
        "| two threads, ms | `linear` takes | torch takes | of the limit |"
    )
    yield f"| ---: |{' ---: |' * 8}"
    rows = {(int(row["rows"]), row["threads"]): row for row in read("packed.csv")}
    for count in sorted({count for count, _ in rows}):
        cells = [
            f"{float(row['packed_ms']):.2f} | {float(row['ratio_to_linear']):.2f}x | "
            f"{float(row['ratio_to_torch']):.2f}x | {float(row['share']):.0%}"
            for row in (rows[count, "1"], rows[count, "2"])
        ]
        yield f"| {count} | {' | '.join(cells)} |"


def step_profile_table() -> Iterator[str]:
    """Where the time of a decode step goes."""
    yield "| weights | step, ms | linear | attention | norms, rope, activation | sampling | outside |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    names = ("step", "linear", "attention", "norms_rope_activations", "sampling", "outside")
    for row in read("step_profile.csv"):
        cells = " | ".join(f"{float(row[f'{name}_ms']):.3g}" for name in names)
        yield f"| {WEIGHTS.get(row['weights'], row['weights'])} | {cells} |"


def read_table() -> Iterator[str]:
    """Loading a checkpoint."""
    kinds = {"engine": "engine", "engine, plain read": "plain read", "engine, plain read, large pages": "large pages"}
    yield f"| weights, threads | {', s | '.join(kinds.values())}, s |"
    yield "| --- | ---: | ---: | ---: |"
    rows = {(row["dtype"], row["threads"], row["engine"]): row for row in read("read.csv")}
    for dtype, threads in dict.fromkeys((dtype, threads) for dtype, threads, _ in rows):
        cells = " | ".join(f"{float(rows[dtype, threads, kind]['seconds']):.2f}" for kind in kinds)
        yield f"| {WEIGHTS.get(dtype, dtype)}, {threads} | {cells} |"


def prefix_table() -> Iterator[str]:
    """The second request of two that share a prefix, or do not."""
    yield "| prefix of 1,024 tokens, int8, one thread | seconds to the first token |"
    yield "| --- | ---: |"
    for row in read("prefix.csv"):
        yield f"| {row['engine'].removeprefix('engine, ')} | {float(row['seconds']):.2f} |"


def ranks_table() -> Iterator[str]:
    """Two ranks of a thread against one process of two."""
    yield "| weights | one process, two threads | of the bandwidth limit | two ranks, one thread each | ratio |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    rows = {(row["dtype"], row["engine"]): row for row in read("ranks.csv")}
    for dtype in dict.fromkeys(dtype for dtype, _ in rows):
        one, two = rows[dtype, "engine"], rows[dtype, "ranks"]
        rates = float(one["tokens_per_s"]), float(two["tokens_per_s"])
        share = f"{float(one['share_of_limit']):.0%}"
        yield f"| {WEIGHTS.get(dtype, dtype)} | {rates[0]:.1f} | {share} | {rates[1]:.1f} | {rates[1] / rates[0]:.2f} |"


def kv_cache_error_table() -> Iterator[str]:
    """What keys and values in int8 cost."""
    yield (
        "| model, dtype | error of logits, plain cache | int8 cache | same best token, plain | int8 "
        "| perplexity, plain | int8 |"
    )
    yield f"| --- |{' ---: |' * 6}"
    rows = {(row["model"], row["dtype"], row["cache"] == "int8"): row for row in read("kv-cache-error.csv")}
    for model, dtype in dict.fromkeys((model, dtype) for model, dtype, _ in rows):
        both = rows[model, dtype, False], rows[model, dtype, True]
        cells = [f"{float(row['logits_rms']):.2%}" for row in both]
        cells += [f"{float(row['agreement']):.1%}" for row in both]
        cells += [f"{float(row['perplexity']):.3f}" if row["perplexity"] else "-" for row in both]
        yield f"| {model}, {dtype} | {' | '.join(cells)} |"


def kv_cache_speed_table() -> Iterator[str]:
    """Decode attention over int8 caches against caches of floats."""
    yield "| sequences x keys, heads / key heads | faster than over bfloat16 | than over float32 |"
    yield "| --- | ---: | ---: |"
    keys = ("sequences", "keys", "heads", "kv_heads")
    rows = {(tuple(row[k] for k in keys), row["dtype"]): float(row["speedup"]) for row in read("kv-cache-speed.csv")}
    for shape in dict.fromkeys(shape for shape, _ in rows):
        sequences, length, heads, kv_heads = shape
        ratios = f"{rows[shape, 'bfloat16']:.2f}x | {rows[shape, 'float32']:.2f}x"
        yield f"| {sequences} x {length}, {heads}/{kv_heads} | {ratios} |"


def all_reduce_table() -> Iterator[str]:
    """An all-reduce by every way to call it."""
    yield (
        "| all-reduce of | Gloo, us | `dist.all_reduce` | asynchronous | the op, in place | the C call "
        "| Gloo to `dist.all_reduce` | share of copying |"
    )
    yield f"| --- |{' ---: |' * 7}"
    for row in read("collectives.csv"):
        size = int(row["bytes"])
        unit, name = next((u, n) for u, n in ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")) if size >= u)
        times = (float(row[f"{way}_us"]) for way in ("gloo", "torch", "async", "op", "infini"))
        cells = " | ".join(f"{time:,.0f}" if time >= 1000 else f"{time:.1f}" for time in times)
        yield (
            f"| {size // unit} {name} | {cells} | {float(row['ratio_to_gloo']):.0f}x "
            f"| {float(row['share_of_copy']):.2f} |"
        )


# Of a model in 16 bits: GB of weights, hidden size, layers, vocabulary.
SHAPES = {"1.1B": (2.2, 2048, 22, 32000), "8B": (16, 4096, 32, 128256), "70B": (141, 8192, 80, 128256)}
CORE_GB_PER_S = 40  # what a core reads


def scale_out_table() -> Iterator[str]:
    """What ranks exchange for a token, by the formula of the page; nothing is measured."""
    yield "| model, 16 bits | ranks | messages a token | MB a token | ms to read the weights | us a message |"
    yield f"| --- |{' ---: |' * 5}"
    for model, (weights, hidden, layers, vocabulary) in SHAPES.items():
        messages = 2 * layers + 2
        for ranks in (2, 4, 8, 16, 32, 64):
            others = (ranks - 1) / ranks
            size = others * 2 * (2 * hidden * (2 * layers + 1) + vocabulary)
            ms = weights / ranks / CORE_GB_PER_S * 1e3
            yield (f"| {model} | {ranks} | {messages} | {size / 1e6:.2f} | {ms:.1f} | {100 * ms / messages:.0f} |")
