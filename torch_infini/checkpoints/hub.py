"""Finds a checkpoint on this machine by its name: a folder, a .gguf file, or a name on the hub.

Names on the hub go through huggingface_hub, whose cache works without a network.
"""

from __future__ import annotations

import re
from pathlib import Path

from .method import NAME

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# No weights in other formats, but for the small layers of sentence-transformers.
_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja", "*_Dense/pytorch_model.bin"]


def is_hub_name(name: str) -> bool:
    """Return whether a text may be the name of a model on the hub: owner/model."""
    return _HUB_NAME.fullmatch(name) is not None and name[0] != "."


def find(name: str | Path) -> Path:
    """Return the folder or .gguf file of a checkpoint.

    Args:
        name: A path, or "owner/model" of the hub, which is downloaded unless HF_HUB_OFFLINE is set.

    Raises:
        FileNotFoundError: If there is no such path, and no such name on the hub or, without a network, in its cache.
    """
    path = Path(name)
    if path.exists() or not isinstance(name, str) or not is_hub_name(name):
        if path.is_file() and path.suffix != ".gguf":
            raise FileNotFoundError(f"{NAME}: a checkpoint must be a folder or a .gguf file, got {name}")
        if not path.exists():
            raise FileNotFoundError(f"{NAME}: the folder must exist, got {name}")
        return path
    command = f"run `hf download {name}` where there is a network"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            f"{NAME}: names of the hub need huggingface_hub: run `pip install huggingface_hub`"
        ) from error
    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # of huggingface_hub, of requests or of the file system
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise FileNotFoundError(
            f"{NAME}: {name} must be a folder, or a model in the hub's cache: {command}, got: {cause}"
        ) from error
    if not (folder / "config.json").is_file():  # an incomplete download
        raise FileNotFoundError(f"{NAME}: the hub's cache must hold all of {name}: {command}, got no config.json")
    return folder
