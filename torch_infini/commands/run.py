"""run: runs a script for infinicore or infinilm on torch_infini, like `python SCRIPT` or `python -m MODULE`."""

from __future__ import annotations

import argparse
import importlib.machinery
import io
import os
import re
import runpy
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from ..distributed import prepare_workers
from . import transformers4
from .errors import CommandError

HELP = "run a script written for infinicore or infinilm, which are then torch_infini's"
INTERRUPTED = 130  # exit status after Ctrl-C, as in Python


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replace", action="store_true", help="even if packages of these names are installed: the script gets ours"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="a module, and all its arguments"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a file, and all its arguments")


def run(arguments: argparse.Namespace) -> int:
    argv = arguments.module or arguments.script
    if not argv:
        raise CommandError("there must be a SCRIPT, or -m MODULE")
    try:
        from .. import compat
    except ModuleNotFoundError as error:  # a build may leave it out
        raise CommandError(str(error)) from None
    body = module_body(argv[0]) if arguments.module else script_body(argv[0])
    sys.argv = argv
    try:
        compat.install(replace=arguments.replace)
    except ImportError as error:
        raise CommandError(str(error)) from None
    if asks_for_ranks(argv):
        prepare_workers()  # they import torch while the script imports its modules
    try:
        with transformers4.names():
            body()
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = without_own_frames(error.__traceback__)
        if isinstance(error, ImportError) and error.__traceback__ is None:  # -m names no module
            raise CommandError(str(error)) from None
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def asks_for_ranks(argv: list[str]) -> bool:
    """Return whether a script's arguments seem to ask for tensor parallelism: --tp 2, --tensor-parallel-size=4, ..."""
    asked = re.search(r"\0--(tp|tensor[-_]parallel)[\w-]*[=\0]0*([2-9]|[1-9]\d+)(\0|$)", "\0".join(argv))
    return asked is not None and "TORCHELASTIC_RUN_ID" not in os.environ


def script_body(path: str) -> Callable[[], Any]:
    """Prepare a file as `__main__`, with its folder first in sys.path."""
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        raise CommandError(f"SCRIPT must be a Python file, got {path}: {error.strerror}") from error
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11's -P
        if sys.path and sys.path[0] in ("", os.getcwd()):  # what -m has put there
            del sys.path[0]
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))

    def body() -> None:
        module = ModuleType("__main__")
        module.__file__ = os.path.abspath(path)
        module.__loader__ = importlib.machinery.SourceFileLoader("__main__", module.__file__)
        vars(module).update(__builtins__=__builtins__, __cached__=None)
        sys.modules["__main__"] = module
        exec(compile(source, module.__file__, "exec", dont_inherit=True), vars(module))

    return body


def module_body(name: str) -> Callable[[], Any]:
    """Prepare a module, or a package's __main__."""
    from .. import compat

    # runpy gets code from a loader, and an alias's loader has none: run the real module.
    real = compat.AliasFinder(compat.ALIASES).target(name) or name
    return lambda: runpy.run_module(real, run_name="__main__", alter_sys=True)


def without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames above the script's."""
    above = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in above:
        traceback = traceback.tb_next
    return traceback
