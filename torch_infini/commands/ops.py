"""ops: the table of ops: name, backends, dtypes, forms and schema."""

from __future__ import annotations

import argparse
import inspect
import json

from ..ops import OpSpec, all_ops

HELP = "list the ops with their backends, dtypes, forms and schemas"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def forms(spec: OpSpec) -> list[str]:
    """How the op can be had: by itself, writing to out, in place, as aten ops that a compiler may fuse."""
    return [
        spec.name,
        *(["out"] if spec.outputs else []),
        *([f"{spec.name}_"] if spec.inplace else []),
        *(["decomposition"] if spec.decomposition else []),
    ]


def describe(spec: OpSpec) -> dict[str, str]:
    return {
        "op": spec.name,
        "backends": " ".join(spec.backends),
        "dtypes": " ".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
        "forms": " ".join(forms(spec)),
        "schema": spec.schema,
        "summary": (inspect.getdoc(spec.function) or "").splitlines()[0],
    }


def run(arguments: argparse.Namespace) -> int:
    rows = [describe(spec) for spec in all_ops()]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    columns = ("op", "backends", "dtypes", "forms", "schema")
    widths = {c: max(len(c), *(len(row[c]) for row in rows)) for c in columns}
    for row in ({c: c for c in columns}, *rows):
        print("  ".join(row[c].ljust(widths[c]) for c in columns).rstrip())
    return 0
