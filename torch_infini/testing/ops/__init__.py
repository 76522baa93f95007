"""The tests' descriptions of ops: OP_INFOS["rms_norm"] is an OpInfo, and all_op_infos() yields them by name.

Every module of this folder whose name does not begin with an underscore defines INFO, or INFOS for a family of similar
ops, and is found automatically; C_OPS of a module are the operators of the C ABI that run the same kernels.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from ...ops import REGISTRY
from ..c_ops import COp
from ..op_info import Cost, ErrorCase, OpInfo, Sample

__all__ = ["C_OPS", "OP_INFOS", "Cost", "ErrorCase", "OpInfo", "Sample", "all_c_ops", "all_op_infos"]

OP_INFOS: dict[str, OpInfo] = {}
C_OPS: list[COp] = []


def all_op_infos() -> Iterator[OpInfo]:
    """Yield the OpInfo of every op, by name."""
    return iter(sorted(OP_INFOS.values(), key=lambda info: info.name))


def all_c_ops() -> Iterator[COp]:
    """Yield every operator of the C ABI."""
    return iter(C_OPS)


for _module in iter_modules(__path__):
    _found = import_module(f"{__name__}.{_module.name}")
    C_OPS.extend(getattr(_found, "C_OPS", ()))
    if not _module.name.startswith("_"):
        for _info in getattr(_found, "INFOS", None) or (_found.INFO,):
            assert _info.name not in OP_INFOS, f"two proofs of {_info.name}"
            OP_INFOS[_info.name] = _info

_missing = REGISTRY.keys() - OP_INFOS.keys()
assert not _missing, f"torch_infini/testing/ops has no OpInfo of {', '.join(sorted(_missing))}"
