"""Processes for ranks and programs that tests and benchmarks run; each starts with torch imported.

They are forked from a server that has imported it once, because the import takes longer than most of them run (2 s of
CPU).
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking(*modules: str) -> ForkServerContext:
    """Return multiprocessing's context whose server imports torch, torch_infini and these modules.

    A program has one server, so the modules of the first call count. Only name modules that compute nothing and start
    no threads when they are imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch_infini", *modules])
    return context
