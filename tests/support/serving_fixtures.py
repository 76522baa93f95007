"""Fixtures of tests that serve a small model; a test file has them by pytest_plugins = ["support.serving_fixtures"]."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_infini import AsyncLLM

from .serving import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[AsyncLLM]:
    """The model of `folder`, which may be another file's own, with four sequences in a step."""
    torch.set_num_threads(1)
    made = AsyncLLM(folder, max_num_seqs=4)
    yield made
    made.close()
