"""HAS_COMPAT: whether this build has torch_infini.compat, which INFINI_COMPAT=0 leaves out; an import of it says so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_PACKAGE = __name__.partition(".")[0]
COMPAT = f"{_PACKAGE}.compat"
HAS_COMPAT = Path(__file__).parent.with_name("compat").is_dir()


class _LeftOut(MetaPathFinder):
    """The first finder: that of an editable install would find the folder of another checkout."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != COMPAT and not name.startswith(f"{COMPAT}."):
            return None
        raise ModuleNotFoundError(
            f"{COMPAT}, which scripts for infinicore and infinilm need, is not in this build, made with "
            "INFINI_COMPAT=0: `pip install --force-reinstall --no-deps .` in a checkout, without that variable, has it",
            name=name,
        )


if not HAS_COMPAT and not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _LeftOut())
