"""The tables of docs/engine.md and docs/distributed.md: the engine, its caches and ranks."""

from __future__ import annotations

from csv_tables import Cells, Rows, number, size_in_words, table

WEIGHTS = {"bfloat16": "bf16", "dense": "bf16"}
CASES = {
    "generate": "generate 32 tokens",
    "decode-16": "decode",
    "decode-16x8": "decode x 8",
    "decode-16x32": "decode x 32",
    "prefill-512": "prompt of 512",
    "serve-32": "32 requests",
}
COLUMNS = {  # how a CSV names an engine: how the tables do
    "engine": "engine",
    "gguf": "engine, llama.cpp's file",
    "infini": "patched model",
    "eager": "transformers",
    "packed": "packed torch",
    "llama.cpp": "llama.cpp",
    "ik_llama.cpp": "ik_llama.cpp",
    "OpenVINO": "OpenVINO",
}


OURS = ("engine", "gguf", "infini")


def weights_of(row: dict[str, str], column: str = "dtype") -> str:
    return WEIGHTS.get(row[column], row[column])


def columns_of(rows: Rows) -> dict[str, str]:
    return {key: label for key, label in COLUMNS.items() if any(row["engine"].startswith(key) for row in rows)}


def has_limit(rows: Rows) -> bool:
    return any(row["share_of_limit"] for row in rows)


def engine_heads(rows: Rows) -> str:
    limit = ["engine: of the bandwidth limit"] if has_limit(rows) else []
    return " | ".join(["case, weights, threads", *columns_of(rows).values(), "engine to the best other", *limit])


@table("engine-160M.csv", engine_heads, name="engine_160M")
@table("engine-1.1B.csv", engine_heads, name="engine_1B")
@table("serve.csv", engine_heads, name="serve")
@table("mixtures.csv", engine_heads, name="mixtures")
@table("mixtures-gpt-oss.csv", engine_heads, name="mixtures_gpt_oss")
@table("decoders.csv", engine_heads, name="decoders")
def by_engine(rows: Rows) -> Cells:
    """Tokens a second of every engine; the ratio is the engine's to the best other one, patched models left out."""
    keys = ("shape", "cell", "dtype", "threads")
    order, shapes = ("bfloat16", "int8", "int4"), list(dict.fromkeys(row["shape"] for row in rows))
    for shape, cell, dtype, threads in sorted(
        {tuple(row[k] for k in keys) for row in rows},
        key=lambda key: (shapes.index(key[0]), key[1], key[3], order.index(key[2])),
    ):
        of_cell = [row for row in rows if tuple(row[k] for k in keys) == (shape, cell, dtype, threads)]
        rates = {row["engine"]: float(row["tokens_per_s"]) for row in of_cell if row["tokens_per_s"]}  # "": it failed
        best = max(rate for engine, rate in rates.items() if engine.partition(" ")[0] not in OURS)
        name = f"{shape}: " if len(shapes) > 1 else ""
        cells = [f"{name}{CASES[cell]}, {WEIGHTS.get(dtype, dtype)}, {threads}"]
        for column in columns_of(rows):
            found = [(e.removeprefix(column).strip(), rate) for e, rate in rates.items() if e.startswith(column)]
            cells.append(", ".join(f"{variant} {rate:.1f}".strip() for variant, rate in found) or "-")
        share = next(number(row, "share_of_limit", "{:.0%}") for row in of_cell if row["engine"] == "engine")
        yield [*cells, f"{rates['engine'] / best:.2f}x", *([share] if has_limit(rows) else [])]


GGUF = "case, file, threads | llama.cpp | engine | ratio | engine: of the bandwidth limit | logit error | engine"


@table("gguf.csv", GGUF)
def gguf(rows: Rows) -> Cells:
    """Tokens a second with a GGUF file by llama.cpp and by the engine, and how far their logits are from bfloat16's."""
    of_engine = {(row["cell"], row["threads"], row["dtype"], row["engine"]): row for row in rows}
    for (cell, threads, dtype, engine), theirs in of_engine.items():
        if not engine.startswith("llama.cpp"):
            continue
        ours = of_engine[cell, threads, dtype, engine.replace("llama.cpp", "gguf")]
        rates = [number(row, "tokens_per_s", "{:.1f}") for row in (theirs, ours)]
        ratio = f"{float(ours['tokens_per_s']) / float(theirs['tokens_per_s']):.2f}x"
        errors = [number(row, "logit_error", "{:.1%}") for row in (theirs, ours)]
        file = engine.partition(" ")[2] or "Q8_0"
        yield [f"{CASES[cell]}, {file}, {threads}", *rates, ratio, number(ours, "share_of_limit", "{:.0%}"), *errors]


VLLM = "case, weights, threads | vLLM | with the plugin | ratio | this package's engine | to vLLM | logit errors"


@table("vllm.csv", VLLM, "lrrrrrr")
def vllm(rows: Rows) -> Cells:
    """Tokens a second of vLLM without and with the plugin, and of the engine; errors in the order of the columns."""
    by_case = {(row["dtype"], row["cell"], row["threads"], row["engine"]): row for row in rows}
    for dtype, cell, threads in dict.fromkeys((dtype, cell, threads) for dtype, cell, threads, _ in by_case):
        some = [by_case[dtype, cell, threads, engine] for engine in ("vLLM plain", "vLLM plugin", "engine")]
        plain, plugin, ours = (float(row["tokens_per_s"]) for row in some)
        errors = ", ".join(number(row, "logit_error", "{:.1%}") for row in some)
        case, ratios = f"{CASES[cell]}, {WEIGHTS.get(dtype, dtype)}, {threads}", (plugin / plain, ours / plain)
        rates = [f"{rate:.1f}" for rate in (plain, plugin, ours)]
        yield [case, *rates[:2], f"{ratios[0]:.2f}x", rates[2], f"{ratios[1]:.2f}x", errors]


@table(
    "encoders.csv", "weights, threads | engine | texts a second | to sentence-transformers on torch | 1 - cosine", "ll"
)
def encoders(rows: Rows) -> Cells:
    """32 texts through all-MiniLM-L6-v2."""
    for row in rows:
        rate, ratio = number(row, "texts_per_s", "{:.1f}"), number(row, "ratio")
        yield [f"{weights_of(row)}, {row['threads']}", row["engine"], rate, ratio]


SIDE = "ms | `linear` takes | torch takes | of the limit"


@table("packed.csv", f"rows | one thread, {SIDE} | two threads, {SIDE}", "r")
def packed(rows: Rows) -> Cells:
    """Products of a decoder layer by the number of rows."""
    by_case = {(int(row["rows"]), row["threads"]): row for row in rows}
    for count in sorted({count for count, _ in by_case}):
        cells = [str(count)]
        for row in (by_case[count, "1"], by_case[count, "2"]):
            ratios = (number(row, f"ratio_to_{rival}") for rival in ("linear", "torch"))
            cells += [number(row, "packed_ms", "{:.2f}"), *ratios, number(row, "share", "{:.0%}")]
        yield cells


@table(
    "step_profile.csv",
    "weights | step, ms | linear | its MB | of the limit | attention | norms, rope, activation | sampling | outside",
)
def step_profile(rows: Rows) -> Cells:
    """Where the time of a decode step goes."""
    names = ("attention", "norms_rope_activations", "sampling", "outside")
    for row in rows:
        milliseconds, rate = float(row["linear_ms"]), float(row["linear_gb_per_s"])
        yield [
            weights_of(row, "weights"),
            number(row, "step_ms", "{:.3g}"),
            f"{milliseconds:.3g}",
            f"{milliseconds * rate:.0f}",
            f"{rate / float(row['read_gb_per_s']):.0%}",
            *(number(row, f"{name}_ms", "{:.3g}") for name in names),
        ]


READS = {"engine": "engine", "engine, plain read": "plain read", "engine, plain read, large pages": "large pages"}


@table("read.csv", f"weights, threads | {', s | '.join(READS.values())}, s")
def read(rows: Rows) -> Cells:
    """Loading a checkpoint."""
    by_case = {(row["dtype"], row["threads"], row["engine"]): row for row in rows}
    for dtype, threads in dict.fromkeys((dtype, threads) for dtype, threads, _ in by_case):
        seconds = (number(by_case[dtype, threads, kind], "seconds", "{:.2f}") for kind in READS)
        yield [f"{WEIGHTS.get(dtype, dtype)}, {threads}", *seconds]


@table("prefix.csv", "prefix of 1,024 tokens, int8, one thread | seconds to the first token")
def prefix(rows: Rows) -> Cells:
    """The second request of two that share a prefix, or do not."""
    for row in rows:
        yield [row["engine"].removeprefix("engine, "), number(row, "seconds", "{:.2f}")]


@table(
    "ranks.csv",
    "weights | one process, two threads | of the bandwidth limit | two ranks, one thread each | ratio",
)
def ranks(rows: Rows) -> Cells:
    """Two ranks of a thread against one process of two."""
    by_case = {(row["dtype"], row["engine"]): row for row in rows}
    for dtype in dict.fromkeys(dtype for dtype, _ in by_case):
        one, two = by_case[dtype, "engine"], by_case[dtype, "ranks"]
        rates = [number(row, "tokens_per_s", "{:.1f}") for row in (one, two)]
        ratio = float(two["tokens_per_s"]) / float(one["tokens_per_s"])
        yield [weights_of(one), rates[0], number(one, "share_of_limit", "{:.0%}"), rates[1], f"{ratio:.2f}"]


@table(
    "kv-cache-error.csv",
    "model, dtype | error of logits, plain cache | int8 cache | same best token, plain | int8 "
    "| perplexity, plain | int8",
)
def kv_cache_error(rows: Rows) -> Cells:
    """What keys and values in int8 cost."""
    by_case = {(row["model"], row["dtype"], row["cache"] == "int8"): row for row in rows}
    for model, dtype in dict.fromkeys((model, dtype) for model, dtype, _ in by_case):
        cells = [f"{model}, {dtype}"]
        for name, form in (("logits_rms", "{:.2%}"), ("agreement", "{:.1%}"), ("perplexity", "{:.3f}")):
            cells += [number(by_case[model, dtype, int8], name, form) for int8 in (False, True)]
        yield cells


@table("kv-cache-speed.csv", "sequences x keys, heads / key heads | faster than over bfloat16 | than over float32")
def kv_cache_speed(rows: Rows) -> Cells:
    """Decode attention over int8 caches against caches of floats."""
    keys = ("sequences", "keys", "heads", "kv_heads")
    by_case = {(tuple(row[k] for k in keys), row["dtype"]): row for row in rows}
    for shape in dict.fromkeys(shape for shape, _ in by_case):
        ratios = (number(by_case[shape, dtype], "speedup") for dtype in ("bfloat16", "float32"))
        yield ["{} x {}, {}/{}".format(*shape), *ratios]


@table(
    "collectives.csv",
    "all-reduce of | Gloo, us | `dist.all_reduce` | asynchronous | the op, in place | the C call "
    "| Gloo to `dist.all_reduce` | share of copying",
)
def all_reduce(rows: Rows) -> Cells:
    """An all-reduce by every way to call it."""
    for row in rows:
        times = (float(row[f"{way}_us"]) for way in ("gloo", "torch", "async", "op", "infini"))
        cells = [f"{time:,.0f}" if time >= 1000 else f"{time:.1f}" for time in times]
        ratios = number(row, "ratio_to_gloo", "{:.0f}x"), number(row, "share_of_copy", "{:.2f}")
        yield [size_in_words(int(row["bytes"])), *cells, *ratios]


@table(
    "paged_models.csv",
    "model, threads | one request, tokens/s: transformers | patched | engine | engine to transformers "
    "| 32 requests: transformers, padded | engine | engine to transformers",
    "lrrrrrrr",
)
def paged_models(rows: Rows) -> Cells:
    """Models of transformers in the engine, beside transformers' own generate, in bfloat16."""
    for row in rows:
        size = f"{float(row['parameters_millions']):.0f}M"
        rates = [number(row, f"{form}_tokens_per_second", "{:.1f}") for form in ("transformers", "patched", "engine")]
        many = [number(row, f"{form}_tokens_per_second_32", "{:.0f}") for form in ("transformers", "engine")]
        case = f"{row['family']}, {size}, {row['threads']}"
        yield [case, *rates, number(row, "ratio"), *many, number(row, "ratio_32")]


@table(
    "continuous.csv",
    "model, threads | paged eager | sdpa | patched | patched, packed | packed to the better of transformers'",
    "lrrrrr",
)
def continuous(rows: Rows) -> Cells:
    """transformers' generate_batch: 32 requests, tokens a second, by its own attentions and patched."""
    for row in rows:
        forms = ("paged_eager", "sdpa", "patched", "packed")
        rates = [number(row, f"{form}_tokens_per_second", "{:.0f}") for form in forms]
        case = f"{row['family']}, {float(row['parameters_millions']):.0f}M, {row['threads']}"
        yield [case, *rates, number(row, "ratio")]
