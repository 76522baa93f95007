"""Finds and loads the library of device `infini`, which is built for one release of torch.

A missing or unsuitable library raises one ImportError that says what to do.
"""

from __future__ import annotations

from pathlib import Path

import torch

from .._core.library import PATH, ROOT, is_whole, require_part

OLDEST_TORCH = (2, 13)
BUILD = "pip install --no-build-isolation --force-reinstall --no-deps"


def release(version: str) -> tuple[int, int]:
    """Return (2, 13) for "2.13.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def library(version: str, folder: Path) -> Path:
    """Return the library for a torch, or raise ImportError.

    Args:
        version: torch.__version__.
        folder: The folder of the libraries.

    Raises:
        ImportError: If this torch is too old, or the folder has libraries for other releases only.
    """
    major, minor = wanted = release(version)
    if wanted < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"torch_infini.device needs torch >= {oldest}, found {version}")
    path = folder / f"libinfini_device-{major}.{minor}.so"
    if not path.is_file():
        others = sorted(other.stem.partition("-")[2] for other in folder.glob("libinfini_device-*.so"))
        built = f"built for torch {' and '.join(others)}" if others else "not built"
        raise ImportError(
            f"torch_infini.device is {built}, and torch {version} is installed: run `{BUILD}` with the source of "
            f"torch_infini (its folder, or its git URL) to build it for {major}.{minor}"
        )
    return path


def load() -> None:
    """Load the library into torch; it registers only the ops of torch.ops.infini_device.

    Raises:
        ImportError: If there is no library for this torch, or it does not load.
    """
    require_part("torch_infini.device", is_whole(ROOT / "lib"))
    folder = PATH.parent if any(PATH.parent.glob("libinfini_device-*.so")) else ROOT / "lib"
    path = library(torch.__version__, folder)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"{path.name} cannot be loaded with torch {torch.__version__} ({error}): run `{BUILD}` with the source of "
            "torch_infini to build it anew"
        ) from error
