"""describe: how the model in a folder computes, by torch_infini.describe."""

from __future__ import annotations

import argparse
import logging

from .errors import CommandError

HELP = "print how a model computes, layer by layer, and what there are kernels for"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a .gguf file, or owner/model; only its config is needed"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..patch import describe

    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        print(describe(arguments.model))
    except (OSError, ValueError, ImportError) as error:
        raise CommandError(str(error)) from error
    return 0
