"""Fixtures for all tests, and the determinism they rely on."""

import os
import tempfile

import pytest

# Compiled graphs of earlier builds must not stand in for what is tested now.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_infini_inductor_")

import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
