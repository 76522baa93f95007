"""root: prints the folder with the C libraries (lib/) and headers (include/), for INFINI_ROOT and compilers."""

from __future__ import annotations

import argparse

from .._core.library import ROOT, is_whole, require_part
from .errors import CommandError

HELP = "print the folder that serves as INFINI_ROOT: lib/ and include/ of the C libraries"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(arguments: argparse.Namespace) -> int:
    try:
        require_part("the set of C libraries", is_whole(ROOT / "lib"))
    except ImportError as error:
        raise CommandError(str(error)) from None
    print(ROOT)
    return 0
