"""The ops: a module for each, with its schema, documented function and fake.

torch_infini.ops.<name>(...) is the documented function, torch.ops.infini.<name> the op it calls.
Every module of this folder whose name does not begin with an underscore defines one op (SPEC) or a family of similar
ops (SPECS), and is found automatically. __init__.pyi declares the same for type checkers; `make docs` writes it.
"""

import os
from importlib import import_module
from pkgutil import iter_modules

# Import the library first: if it lacks something, the import fails before any op is defined, and can be tried again.
from .._core import library  # noqa: F401
from ._provider_kernels import Provider
from ._providers import (
    awaited_providers,
    choose_providers,
    chosen_providers,
    providers,
    register_provider,
    unregister_provider,
    use_provider,
)
from ._registry import FLOATS, REGISTRY, OpSpec, all_ops, register

__all__ = [
    "FLOATS",
    "REGISTRY",
    "OpSpec",
    "Provider",
    "all_ops",
    "awaited_providers",
    "choose_providers",
    "chosen_providers",
    "providers",
    "register_provider",
    "unregister_provider",
    "use_provider",
]

for _module in iter_modules(__path__):
    if not _module.name.startswith("_"):
        _found = import_module(f"{__name__}.{_module.name}")
        for _spec in getattr(_found, "SPECS", None) or (_found.SPEC,):
            register(_spec)
            # The function replaces the module that defines it, so that torch_infini.ops.rms_norm can be called.
            globals()[_spec.name] = _spec.function
            __all__.append(_spec.name)

if os.environ.get("INFINI_LOG"):  # after all ops, because a logging kernel is registered over each
    from ._logging import start

    start(os.environ["INFINI_LOG"])

if os.environ.get("INFINI_PROVIDERS"):
    try:
        choose_providers(os.environ["INFINI_PROVIDERS"])
    except ValueError as _error:
        raise ImportError(f"torch_infini: {_error}") from None
