"""ops: the table of ops: name, backends, dtypes, out and in-place form, fake, decomposition, providers and schema."""

from __future__ import annotations

import argparse
import inspect
import json
from typing import TYPE_CHECKING

import torch

from ..ops import chosen_providers, providers

if TYPE_CHECKING:
    from ..testing.ops import OpInfo

HELP = "list the ops with their backends, dtypes, forms (out, in place, fake, decomposition) and schemas"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def describe(spec: OpInfo) -> dict[str, str | bool]:
    """Return a row; the forms besides the functional one are true or false. Providers are listed if any exist."""
    return {
        "op": spec.name,
        "backends": " ".join(spec.backends),
        "dtypes": " ".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
        "out": spec.outputs > 0,
        "inplace": spec.inplace is not None,
        "fake": torch._C._dispatch_has_kernel_for_dispatch_key(f"infini::{spec.name}", "Meta"),
        "decomposition": spec.decomposition is not None,
        **({"providers": provided(spec.name)} if providers() else {}),
        "schema": spec.schema,
        "summary": (inspect.getdoc(spec.function) or "").splitlines()[0],
    }


def provided(op: str) -> str:
    """Return the op's providers, in the form of INFINI_PROVIDERS."""
    chosen = chosen_providers()
    return ", ".join(f"{p.name}@{p.device}{' (in use)' if p in chosen else ''}" for p in providers(op))


def cell(value: str | bool) -> str:
    return "yes" if value is True else value or "-"


def run(arguments: argparse.Namespace) -> int:
    from ..testing.ops import all_op_infos

    rows = [describe(spec) for spec in all_op_infos()]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return 0
    columns = [name for name in rows[0] if name != "summary"]
    table = [columns, *([cell(row[name]) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    return 0
