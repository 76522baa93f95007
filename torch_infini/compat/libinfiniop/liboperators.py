"""open_lib: libinfinirt and libinfiniop as one object, InfiniLib, every function with its signature."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from ..._core.headers import parse
from ..._core.library import PATH, require_part
from .op_register import OpRegister

PACKAGE = Path(__file__).resolve().parents[2]


class InfiniLib:
    """Both libraries as one object: a name is looked up in libinfiniop, then in libinfinirt."""

    def __init__(self, librt: ctypes.CDLL, libop: ctypes.CDLL, root: Path = PACKAGE) -> None:
        self.librt = librt
        self.libop = libop
        self.root = root
        self.interface = parse(root / "include")

    def __getattr__(self, name: str) -> Any:
        for library in (self.libop, self.librt):
            try:
                return getattr(library, name)
            except AttributeError:
                continue
        raise AttributeError(f"neither libinfiniop nor libinfinirt has {name}")


def open_lib() -> InfiniLib:
    """Load the libraries below $INFINI_ROOT, or, if it is not set, those that torch_infini itself has loaded.

    Returns:
        The libraries; their functions' argtypes and restype are set from the headers in $INFINI_ROOT/include.

    Raises:
        AssertionError: If a library, or the headers with the signatures, are missing.
        ImportError: If torch_infini was built without the C interface.
    """
    given = os.environ.get("INFINI_ROOT")
    root = Path(given) if given else PACKAGE
    folder = root / "lib" if given else PATH.parent
    paths = [folder / f"{name}.so" for name in ("libinfinirt", "libinfiniop")]
    for path in paths:
        assert path.is_file(), f"{path.name} is not in {path.parent}: build torch_infini, or set INFINI_ROOT"
    runtime, operators = (ctypes.CDLL(str(path)) for path in paths)
    require_part("the C interface of the ops", hasattr(operators, "infiniopCreateHandle"))
    lib = InfiniLib(runtime, operators, root=root)
    missing = f"{root / 'include'} has no headers of torch_infini: without them no function has a signature"
    assert lib.interface.functions, missing
    OpRegister.register_lib(lib)
    return lib


LIBINFINIOP = open_lib()
