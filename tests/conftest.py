"""Fixtures for all tests, and the determinism they rely on."""

import os
import tempfile
from collections.abc import Iterator

import pytest

# Compiled graphs of earlier builds must not stand in for what is tested now.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_infini_inductor_")
# Nor a table of products that somebody measured on this machine.
os.environ.setdefault("INFINI_PRODUCTS", "default")

import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from several, and lose much to them on a busy machine."""
    from torch_infini.testing import threads_set_to

    with threads_set_to(1):
        yield


@pytest.fixture
def no_graphs_left() -> Iterator[None]:
    """Graphs that a test compiled, and the hooks that they hold, end with it."""
    yield
    torch._dynamo.reset()
