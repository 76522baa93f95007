"""root: the folder with the C libraries (lib/) and their headers (include/), for INFINI_ROOT and for compilers."""

from __future__ import annotations

import argparse

from .._library import ROOT, is_whole
from .errors import CommandError

HELP = "print the folder that serves as INFINI_ROOT: lib/ and include/ of the C libraries"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    if not is_whole(ROOT / "lib"):
        raise CommandError(
            "the C libraries are not in this build, which has what `make demo` runs: `make build` builds the rest"
        )
    print(ROOT)
    return 0
