"""Prints the tables that README.md and csrc/README.md quote, as Markdown, from the CSV files of one kind of CPU.

python benchmarks/table.py              # of results/zen-5, which the pages quote
python benchmarks/table.py --cpu zen-4
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "zen-5"
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


def read(name: str | Path) -> list[dict[str, str]]:
    """A file of the kind of CPU, or a whole path."""
    with (RESULTS / name).open() as file:
        return list(csv.DictReader(file))


def ops_table() -> Iterator[str]:
    """Functional calls against plain torch, for both make their results anew; the out form against the limit."""
    yield "| op, bfloat16, one thread | us | out, us | eager takes | compiled takes | out: share of limit |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    rows = {(row["op"], row["sample"]): row for row in read("ops.csv") if row["dtype"] == "bfloat16"}
    for op, samples in SHOWN.items():
        for sample in samples:
            row = rows[op, sample]
            functional, out = float(row["infini_us"]), float(row["infini_out_us"])
            eager, compiled = float(row["ratio_to_eager"]), float(row["ratio_to_compile"])
            yield (
                f"| `{op}` {sample} | {functional:.1f} | {out:.1f} | {eager:.2f}x | {compiled:.2f}x "
                f"| {float(row['share']):.0%} of {row['limit'].split(',')[0]} |"
            )


def kinds_table() -> Iterator[str]:
    """The same op on every kind of CPU that was measured: how long eager torch takes of our time."""
    kinds = {
        f"{folder.name.replace('-', ' ').title().replace('Amx', 'AMX')}{capped}": {
            (row["op"], row["sample"]): float(row["ratio_to_eager"])
            for row in read(folder / name)
            if row["dtype"] == "bfloat16" and row["threads"] == "1" and row["ratio_to_eager"]
        }
        for folder in sorted(RESULTS.parent.iterdir(), reverse=True)
        for name, capped in (("ops.csv", ""), ("ops-avx2.csv", ", AVX2"))
        if (folder / name).exists()
    }
    yield f"| op, bfloat16, one thread: eager takes | {' | '.join(kinds)} |"
    yield f"| --- |{' ---: |' * len(kinds)}"
    for op, samples in SHOWN.items():
        for sample in samples:
            ratios = (ratios.get((op, sample)) for ratios in kinds.values())
            yield f"| `{op}` {sample} | {' | '.join(f'{r:.2f}x' if r else '-' for r in ratios)} |"


def decode_table() -> Iterator[str]:
    """The 1.1B-shape model, unpatched and patched."""
    yield "| 1.1B shape, bfloat16, batch 1, one thread | unpatched | patched | ratio | share of memory bandwidth |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    rows = {(row["phase"], row["variant"]): row for row in read("decode.csv")}
    for phase in dict.fromkeys(phase for phase, _ in rows):
        plain, patched = rows[phase, "unpatched"], rows[phase, "patched"]
        share = f"{float(patched['share_of_read_bandwidth']):.0%}" if patched["share_of_read_bandwidth"] else ""
        yield (
            f"| {phase} tokens/s | {float(plain['tokens_per_s']):.1f} | {float(patched['tokens_per_s']):.1f} "
            f"| {float(patched['ratio_to_unpatched']):.2f} | {share} |"
        )


def steps_table() -> Iterator[str]:
    """Where the time of a patched model's step goes."""
    yield "| step, weights, threads | ms | products | attention | other ops | host | products read weights at |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | --- |"
    for row in read("steps.csv"):
        step = float(row["step_ms"])
        parts = (float(row[name]) / step for name in ("products_ms", "attention_ms", "other_ops_ms", "host_ms"))
        rate = row["weights_gb_per_s"]
        share = f"{float(rate) / float(row['read_gb_per_s']):.0%} of memory bandwidth" if rate else "-"
        yield (
            f"| {row['shape']}, {row['phase']} {row['length']}, {row['weights']}, {row['threads']} | {step:.2f} "
            f"| {' | '.join(f'{round(part, 2) + 0.0:.0%}' for part in parts)} | {share} |"
        )


def families_table() -> Iterator[str]:
    """What patch_model does to every family it serves."""
    yield (
        "| family | modules replaced | float32: largest difference of a logit | tokens equal "
        "| bfloat16: mean error, the original's own | decode is faster |"
    )
    yield "| --- | --- | ---: | --- | --- | ---: |"
    for row in read("families.csv"):
        left = f", {row['left']} left" if row["left"] != "0" else ""
        yield (
            f"| {row['family']} | {row['replaced']}{left} | {float(row['float32_difference']):.1e} "
            f"| {'yes' if row['tokens_equal'] == 'True' else 'no'} "
            f"| {float(row['bfloat16_error']):.2e}, {float(row['bfloat16_original']):.2e} "
            f"| {float(row['ratio']):.2f}x |"
        )


def c_abi_table() -> Iterator[str]:
    """The C ABI: ratios to torch and the share of the limit, one thread and two, by dtype."""
    yield "| op, case | dtype | us | eager takes | compiled takes | share of limit | two threads: the same three |"
    yield "| --- | --- | ---: | ---: | ---: | --- | --- |"
    rows = {(row["op"], row["case"], row["dtype"], row["threads"]): row for row in read("c-abi.csv")}

    def ratio(row: dict[str, str], name: str) -> str:
        return f"{float(row[name]):.2f}x" if row[name] else "-"

    for (op, case, dtype, threads), row in rows.items():
        if threads != "1":
            continue
        two = rows[op, case, dtype, "2"]
        unit = "arithmetic" if row["limit"].endswith("FLOP/s") else "bandwidth"
        ratios = [ratio(r, f"ratio_to_{name}") for r in (row, two) for name in ("eager", "compile")]
        yield (
            f"| {op} {case} | {dtype} | {float(row['infini_us']):.1f} | {ratios[0]} | {ratios[1]} "
            f"| {float(row['share']):.0%} of {unit} | {ratios[2]}, {ratios[3]}, {float(two['share']):.0%} |"
        )


def sites_table() -> Iterator[str]:
    """What backend="infini" finds in six families, and how exact the compiled models are."""
    yield "| model | sites: found and replaced of expected | eager from float64 | compiled | compiled from eager |"
    yield "| --- | --- | ---: | ---: | ---: |"
    rows = [row for row in read("compile-sites.csv") if row["dtype"] == "bfloat16"]
    for family in dict.fromkeys(row["family"] for row in rows):
        sites = [row for row in rows if row["family"] == family]
        text = ", ".join(
            f"{row['pattern']} {row['found']} and {row['replaced']} of {row['expected']}"
            + (f" ({row['left']})" if row["left"] else "")
            for row in sites
        )
        errors = [
            f"{float(sites[0][name]):.1e}"
            for name in ("eager_from_float64", "infini_from_float64", "infini_from_eager")
        ]
        yield f"| {family} | {text} | {' | '.join(errors)} |"


def compile_table() -> Iterator[str]:
    """backend="infini" against plain Inductor."""
    yield "| compiled Llama, bfloat16, batch 1, one thread | Inductor, ms | infini, ms | ratio |"
    yield "| --- | ---: | ---: | ---: |"
    for row in read("compile.csv"):
        inductor, infini = float(row["inductor_ms"]), float(row["infini_ms"])
        what = "prefill of 512 tokens" if row["phase"] == "prefill" else "a decode step at 512"
        yield f"| {row['shape']} shape, {what} | {inductor:.1f} | {infini:.1f} | {float(row['ratio']):.2f} |"


def quantised_table() -> Iterator[str]:
    """Linear layers with weights of 8 and 4 bits; every weight comes from memory."""
    yield "| op, bfloat16 x, one thread | us | torch's own takes | dense bfloat16 takes | share of the limit |"
    yield "| --- | ---: | ---: | ---: | --- |"
    for row in read("quantised.csv"):
        torch_takes, dense_takes = float(row["ratio_to_torch"]), float(row["ratio_to_dense"])
        share = f"{float(row['share']):.0%} of bandwidth"
        quantised = row.get("quantize_x") == "True"  # older files have no such column
        if quantised and row["share_of_vnni"]:
            share += f", {float(row['share_of_vnni']):.0%} of VNNI's peak"
        yield (
            f"| `{row['op']}` {row['rows']}x{row['k']}->{row['n']}{', `quantize_x`' if quantised else ''} "
            f"| {float(row['infini_us']):.0f} | {torch_takes:.2f}x | {dense_takes:.2f}x | {share} |"
        )


def generate_table(name: str = "generate.csv") -> Iterator[str]:
    """Generation by every engine, tokens a second; quantised weights with their logit error."""
    rows = read(name)
    columns = {"eager": "torch", "compile": "torch.compile", "packed": "packed"}
    columns |= {engine: engine for engine in ("llama.cpp", "OpenVINO", "infini")}
    yield f"| shape, cell, weights, threads | {' | '.join(columns.values())} | infini: share of memory bandwidth |"
    yield f"| --- |{' ---: |' * (len(columns) + 1)}"

    def entry(row: dict[str, str]) -> str:
        variant = row["engine"].partition(" ")[2]
        error = f" ({float(row['logit_error']):.1%})" if row["dtype"] != "bfloat16" and row["logit_error"] else ""
        number = f"{float(row['tokens_per_s']):.1f}" if row["tokens_per_s"] else "failed"
        return f"{variant} {number}{error}".strip()

    keys = ("shape", "cell", "dtype", "threads")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        of_cell = [row for row in rows if tuple(row[k] for k in keys) == key]
        by_engine = {
            engine: ", ".join(entry(row) for row in of_cell if row["engine"].partition(" ")[0] == engine) or "-"
            for engine in columns
        }
        shares = [row["share_of_limit"] for row in of_cell if row["engine"] == "infini" and row["share_of_limit"]]
        share = f"{float(shares[0]):.0%}" if shares else "-"
        yield f"| {', '.join(key)} | {' | '.join(by_engine.values())} | {share} |"


def collectives_table() -> Iterator[str]:
    """All-reduce between processes, by size."""
    yield "| all-reduce between processes | us | Gloo takes | copying takes |"
    yield "| --- | ---: | ---: | ---: |"
    for row in read("collectives.csv"):
        size, ours = int(row["bytes"]), float(row["infini_us"])  # the C call's
        unit, name = next((u, n) for u, n in ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")) if size >= u)
        yield (
            f"| {row['ranks']} ranks, {size // unit} {name}, {row['dtype']} | {ours:.1f} "
            f"| {float(row['gloo_us']) / ours:.1f}x | {float(row['copy_us']) / ours:.2f}x |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", default=RESULTS.name, help="a folder of results/ (default: %(default)s)")
    RESULTS = RESULTS.with_name(parser.parse_args().cpu)
    tables = {
        decode_table: "decode.csv",
        generate_table: "generate.csv",
        steps_table: "steps.csv",
        families_table: "families.csv",
        sites_table: "compile-sites.csv",
        compile_table: "compile.csv",
        quantised_table: "quantised.csv",
        ops_table: "ops.csv",
        kinds_table: "ops.csv",
        c_abi_table: "c-abi.csv",
        collectives_table: "collectives.csv",
    }
    print("\n\n".join("\n".join(table()) for table, name in tables.items() if (RESULTS / name).exists()))
