"""The tables of docs/server.md: what the server costs, and the server beside others."""

from __future__ import annotations

from csv_tables import Cells, Rows, number, table

NAMES = {"openvino": "OpenVINO GenAI", "vllm": "vLLM"}  # as the table has them, where a CSV has others


def servers_of(rows: Rows) -> list[str]:
    return list(dict.fromkeys(row["server"] for row in rows))


def heads(rows: Rows) -> str:
    servers = [NAMES.get(name, name) for name in servers_of(rows)]
    return " | ".join(["model, clients, threads", *servers, "torch_infini to the best other"])


@table(
    "serving.csv",
    "model, clients, threads | `LLM.generate` | `AsyncLLM.stream` | server | of `LLM.generate` | "
    "later than `AsyncLLM`: first token, ms | another token, ms",
)
def serving(rows: Rows) -> Cells:
    """Tokens a second of one engine by each way to it, and what the server adds."""
    for row in rows:
        rates = [number(row, f"{way}_tokens_per_s", "{:,.0f}") for way in ("generate", "streams", "served")]
        added = [number(row, f"{name}_added_ms", "{:.1f}") for name in ("ttft", "itl")]
        added = ["0.0" if one == "-0.0" else one for one in added]
        yield [f"{row['shape']}, {row['clients']}, {row['threads']}", *rates, number(row, "ratio", "{:.2f}"), *added]


@table("serving-peers.csv", heads)
def serving_peers(rows: Rows) -> Cells:
    """Tokens a second of every server, with the medians in ms to the first token and between two."""
    by_case = {(row["shape"], row["clients"], row["threads"], row["server"]): row for row in rows}
    for case in dict.fromkeys(key[:3] for key in by_case):
        cells = []
        for name in servers_of(rows):
            row = by_case.get((*case, name))
            if row is None or not row["tokens_per_s"]:
                cells.append("-")
            else:
                first, gap = (number(row, key, "{:.3g}") for key in ("ttft_ms", "itl_ms"))
                rate = number(row, "tokens_per_s", "{:,.0f}" if float(row["tokens_per_s"]) >= 100 else "{:.3g}")
                cells.append(f"{rate} ({first}, {gap})")
        yield [", ".join(case), *cells, number(by_case[(*case, "torch_infini")], "infini_ratio")]
