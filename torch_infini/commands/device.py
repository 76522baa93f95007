"""device: runs a list of everyday PyTorch calls on device infini, each checked against the CPU, as a table.

The exit status is 1 if any call fails.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .. import device
from .errors import CommandError

if TYPE_CHECKING:
    from ..device.calls import ExampleCall, Outcome

HELP = 'run 81 everyday PyTorch calls on the device "infini" and compare each with the CPU'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backing", choices=("cpu", "cuda"), help="the device that computes (default: enable()'s)")
    parser.add_argument("--calls", help="names, with commas between (default: all)")
    parser.add_argument("--list", action="store_true", help="print the calls and run nothing")


def chosen(names: str | None) -> list[ExampleCall]:
    from ..device.calls import CALLS

    if names is None:
        return [*CALLS.values()]
    for name in names.split(","):
        if name not in CALLS:
            raise CommandError(f"there is no call {name!r}; `python -m torch_infini device --list` prints them")
    return [CALLS[name] for name in names.split(",")]


def describe(outcome: Outcome) -> str:
    """Format a row of the table; an error follows below its call."""
    call, error = outcome.call, outcome.error
    below = [] if error is None else [f"{type(error).__name__}: {error}"]
    below += [] if outcome.note is None else [outcome.note]
    indented = [f"{'':4}{text}" for entry in below for text in entry.splitlines()]
    state = "ok" if error is None else "FAILED"
    return "\n".join([f"{state:8}{call.area:15}{call.name:22}{call.summary}", *indented])


def run(arguments: argparse.Namespace) -> int:
    from ..device import calls

    listed = chosen(arguments.calls)
    if arguments.list:
        for call in listed:
            print(f"{call.area:15}{call.name:22}{call.summary}")
        return 0
    try:
        device.enable(arguments.backing)
    except (ImportError, RuntimeError) as error:
        raise CommandError(str(error)) from error
    outcomes = []
    for outcome in calls.run(listed):
        print(describe(outcome), flush=True)
        outcomes.append(outcome)
    passed = sum(outcome.error is None for outcome in outcomes)
    print(f"device infini on {device.backing()}: {passed} of {len(outcomes)}")
    return 0 if passed == len(outcomes) else 1
