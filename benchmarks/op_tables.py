"""The tables of docs/speed.md, compiling.md, patching.md and csrc/README.md: ops, models, the C libraries."""

from __future__ import annotations

from csv_tables import RESULTS, Cells, Rows, number, size_in_words, table
from harness import read_csv

# The rows of ops.csv that the README shows, in bfloat16.
SHOWN = {
    "rms_norm": ("512x4096", "16384x4096"),
    "add_rms_norm": ("512x4096", "16384x4096"),
    "silu": ("512x4096", "16384x4096"),
    "swiglu": ("512x4096", "16384x4096"),
    "rope": ("512x32x128", "8192x32x128"),
    "causal_softmax": ("512x4096",),
    "attention": ("decode 1x32/4x64, 2048 keys", "decode 8x32/8x128, 2048 keys", "prefill 512x32/4x64"),
    "linear": ("1x2048->5632", "1x2048->32000", "8x2048->5632", "512x2048->2048"),
    "random_sample": ("1x128256, top-k 50, top-p 0.9",),
}


@table(
    "decode.csv",
    "1.1B shape, bfloat16, batch 1, one thread | unpatched | patched | ratio | share of memory bandwidth",
    "lrrrr",
)
def decode(rows: Rows) -> Cells:
    """The 1.1B-shape model, unpatched and patched."""
    by_variant = {(row["phase"], row["variant"]): row for row in rows}
    for phase in dict.fromkeys(row["phase"] for row in rows):
        both = [by_variant[phase, variant] for variant in ("unpatched", "patched")]
        share = number(both[1], "share_of_read_bandwidth", "{:.0%}").replace("-", "")
        rates = (number(row, "tokens_per_s", "{:.1f}") for row in both)
        yield [f"{phase} tokens/s", *rates, number(both[1], "ratio_to_unpatched", "{:.2f}"), share]


ENGINES = {"eager": "torch", "compile": "torch.compile", "packed": "packed"}
ENGINES |= {engine: engine for engine in ("llama.cpp", "ik_llama.cpp", "OpenVINO", "infini")}


def engine_of(row: dict[str, str]) -> str:
    """Without its variant."""
    return row["engine"].partition(" ")[0]


def engines_in(rows: Rows) -> list[str]:
    return [engine for engine in ENGINES if any(engine_of(row) == engine for row in rows)]


def generate_heads(rows: Rows) -> str:
    columns = (ENGINES[engine] for engine in engines_in(rows))
    return " | ".join(["shape, cell, weights, threads", *columns, "infini: share of memory bandwidth"])


@table("generate.csv", generate_heads)
def generate(rows: Rows) -> Cells:
    """Generation by every engine, tokens a second; quantized weights with their logit error."""

    def entry(row: dict[str, str]) -> str:
        variant = row["engine"].partition(" ")[2]
        error = (
            f" ({number(row, 'logit_error', '{:.1%}')})" if row["dtype"] != "bfloat16" and row["logit_error"] else ""
        )
        rate = number(row, "tokens_per_s", "{:.1f}") if row["tokens_per_s"] else "failed"
        return f"{variant} {rate}{error}".strip()

    key_of = lambda row: tuple(row[name] for name in ("shape", "cell", "dtype", "threads"))
    for key in dict.fromkeys(map(key_of, rows)):
        of_cell = [(engine_of(row), row) for row in rows if key_of(row) == key]
        columns = engines_in(rows)
        entries = (", ".join(entry(row) for engine, row in of_cell if engine == name) or "-" for name in columns)
        shares = [number(row, "share_of_limit", "{:.0%}") for _, row in of_cell if row["engine"] == "infini"]
        yield [", ".join(key), *entries, shares[0] if shares else "-"]


@table("error-bits.csv", "shape, format | bits a weight | error of the logits")
def error_bits(rows: Rows) -> Cells:
    """Formats of integers from small to large; the engine's in bold letters."""
    size = lambda row: float(row["bits_per_weight"] or "inf")  # a format that failed has none
    for shape in dict.fromkeys(row["shape"] for row in rows):
        for row in sorted((row for row in rows if row["shape"] == shape), key=size):
            ours = row["engine"] == "engine"
            name = f'**`weights="{row["format"]}"`**' if ours else f"{row['engine']} {row['format']}"
            yield [f"{shape}, {name}", number(row, "bits_per_weight", "{:.2f}"), number(row, "logit_error", "{:.1%}")]


@table(
    "steps.csv",
    "step, weights, threads | ms | products | attention | other ops | host | products read weights at",
    "lrrrrrl",
)
def steps(rows: Rows) -> Cells:
    """Where the time of a patched model's step goes."""
    for row in rows:
        step, rate = float(row["step_ms"]), row["weights_gb_per_s"]
        parts = (float(row[f"{name}_ms"]) / step for name in ("products", "attention", "other_ops", "host"))
        share = f"{float(rate) / float(row['read_gb_per_s']):.0%} of memory bandwidth" if rate else "-"
        case = f"{row['shape']}, {row['phase']} {row['length']}, {row['weights']}, {row['threads']}"
        yield [case, f"{step:.2f}", *(f"{round(part, 2) + 0.0:.0%}" for part in parts), share]


@table(
    "families.csv",
    "family | modules replaced | float32: largest difference of a logit | tokens equal "
    "| bfloat16: mean error, the original's own | decode is faster",
    "llrllr",
)
def families(rows: Rows) -> Cells:
    """What patch_model does to every family it serves."""
    for row in rows:
        left = f", {row['left']} left" if row["left"] != "0" else ""
        errors = ", ".join(number(row, f"bfloat16_{name}", "{:.2e}") for name in ("error", "original"))
        equal = "yes" if row["tokens_equal"] == "True" else "no"
        difference = number(row, "float32_difference", "{:.1e}")
        yield [row["family"], row["replaced"] + left, difference, equal, errors, number(row, "ratio")]


@table(
    "compile-sites.csv",
    "model | sites: found and replaced of expected | eager from float64 | compiled | compiled from eager",
    "llrrr",
)
def sites(rows: Rows) -> Cells:
    """What backend="infini" finds in six families, and how exact the compiled models are."""
    rows = [row for row in rows if row["dtype"] == "bfloat16"]
    for family in dict.fromkeys(row["family"] for row in rows):
        found = [row for row in rows if row["family"] == family]
        texts = (
            f"{row['pattern']} {row['found']} and {row['replaced']} of {row['expected']}"
            + (f" ({row['left']})" if row["left"] else "")
            for row in found
        )
        names = ("eager_from_float64", "infini_from_float64", "infini_from_eager")
        yield [family, ", ".join(texts), *(number(found[0], name, "{:.1e}") for name in names)]


@table("compile.csv", "compiled Llama, bfloat16, batch 1, one thread | Inductor, ms | infini, ms | ratio", "lrrr")
def compiled(rows: Rows) -> Cells:
    """backend="infini" against plain Inductor."""
    for row in rows:
        what = "prefill of 512 tokens" if row["phase"] == "prefill" else "a decode step at 512"
        times = (number(row, name, "{:.1f}") for name in ("inductor_ms", "infini_ms"))
        yield [f"{row['shape']} shape, {what}", *times, number(row, "ratio", "{:.2f}")]


@table(
    "quantized.csv",
    "op, bfloat16 x, one thread | us | torch's own takes | dense bfloat16 takes | share of the limit",
    "lrrrl",
)
def quantized(rows: Rows) -> Cells:
    """Linear layers with weights of 8 and 4 bits; every weight comes from memory."""
    for row in rows:
        share = f"{number(row, 'share', '{:.0%}')} of bandwidth"
        of_int8 = row.get("quantize_x") == "True"  # older files have no such column
        if of_int8 and row["share_of_vnni"]:
            share += f", {number(row, 'share_of_vnni', '{:.0%}')} of VNNI's peak"
        case = f"`{row['op']}` {row['rows']}x{row['k']}->{row['n']}{', `quantize_x`' if of_int8 else ''}"
        ratios = (number(row, f"ratio_to_{name}") for name in ("torch", "dense"))
        yield [case, number(row, "infini_us", "{:.0f}"), *ratios, share]


@table(
    "ops.csv", "op, bfloat16, one thread | us | out, us | eager takes | compiled takes | out: share of limit", "lrrrrl"
)
def ops(rows: Rows) -> Cells:
    """Functional calls against plain torch, for both make their results anew; the out form against the limit."""
    by_case = {(row["op"], row["sample"]): row for row in rows if row["dtype"] == "bfloat16"}
    for op, samples in SHOWN.items():
        for row in (by_case[op, sample] for sample in samples):
            times = (number(row, name, "{:.1f}") for name in ("infini_us", "infini_out_us"))
            ratios = (number(row, f"ratio_to_{name}") for name in ("eager", "compile"))
            share = f"{number(row, 'share', '{:.0%}')} of {row['limit'].split(',')[0]}"
            yield [f"`{op}` {row['sample']}", *times, *ratios, share]


# Kinds of CPU that all ops were measured on, and the files.
KINDS = {
    folder.name.replace("-", " ").title().replace("Amx", "AMX") + capped: folder / name
    for folder in sorted(RESULTS.iterdir(), reverse=True)
    for name, capped in (("ops.csv", ""), ("ops-avx2.csv", ", AVX2"))
    if (folder / name).exists()
}


@table("ops.csv", " | ".join(["op, bfloat16, one thread: eager takes", *KINDS]), "l" + "r" * len(KINDS))
def ops_by_kind(_: Rows) -> Cells:
    """The same op on every kind of CPU that was measured: how long eager torch takes of our time."""
    files = [
        {(r["op"], r["sample"]): r for r in read_csv(path) if (r["dtype"], r["threads"]) == ("bfloat16", "1")}
        for path in KINDS.values()
    ]
    for op, samples in SHOWN.items():
        for sample in samples:
            found = (file.get((op, sample), {"ratio_to_eager": ""}) for file in files)
            yield [f"`{op}` {sample}", *(number(row, "ratio_to_eager") for row in found)]


@table(
    "c-abi.csv",
    "op, case | dtype | us | eager takes | compiled takes | share of limit | two threads: the same three",
    "llrrrll",
)
def c_abi(rows: Rows) -> Cells:
    """The C ABI: ratios to torch and the share of the limit, one thread and two, by dtype."""
    by_case = {(row["op"], row["case"], row["dtype"], row["threads"]): row for row in rows}
    for row in (row for row in rows if row["threads"] == "1"):
        two = by_case[row["op"], row["case"], row["dtype"], "2"]
        unit = "arithmetic" if row["limit"].endswith("FLOP/s") else "bandwidth"
        ratios = [[number(r, f"ratio_to_{name}") for name in ("eager", "compile")] for r in (row, two)]
        shares = [number(r, "share", "{:.0%}") for r in (row, two)]
        case = [f"{row['op']} {row['case']}", row["dtype"], number(row, "infini_us", "{:.1f}")]
        yield [*case, *ratios[0], f"{shares[0]} of {unit}", ", ".join([*ratios[1], shares[1]])]


@table("collectives.csv", "all-reduce between processes | us | Gloo takes | copying takes", "lrrr")
def collectives(rows: Rows) -> Cells:
    """All-reduce between processes, by size; the time is the C call's."""
    for row in rows:
        ours = float(row["infini_us"])
        ratios = (number(row, "gloo_us", "{:.1f}x", 1 / ours), number(row, "copy_us", "{:.2f}x", 1 / ours))
        yield [f"{row['ranks']} ranks, {size_in_words(int(row['bytes']))}, {row['dtype']}", f"{ours:.1f}", *ratios]
