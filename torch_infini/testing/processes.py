"""Processes for ranks and programs that are run by tests and benchmarks: each begins with torch imported.

They are forked from a server that has imported it once: the import takes longer than most of what they do (2 s of CPU).
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext


def forking(*modules: str) -> ForkServerContext:
    """The context of multiprocessing whose server imports torch, torch_infini and these modules.

    A program has one server: the modules are those of the first call. What computes nothing when it is imported, and
    starts no threads, may be named.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch_infini", *modules])
    return context
