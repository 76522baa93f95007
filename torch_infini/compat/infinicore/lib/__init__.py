"""The package of `_infinicore`, the module of the C++ front end, built for one Python, among the other libraries."""

from ...._core.library import PATH, is_whole, require_part

require_part("infinicore", is_whole())

# The libraries' folder, so that INFINI_LIBRARIES selects this one too.
__path__.append(str(PATH.parent))

try:
    from . import _infinicore as _infinicore
except ImportError as error:
    import sys
    from importlib.machinery import EXTENSION_SUFFIXES

    built = {file.name: file.name.split(".")[1] for file in sorted(PATH.parent.glob("_infinicore.*so"))}
    if any(f"_infinicore{suffix}" in built for suffix in EXTENSION_SUFFIXES):
        found = str(error)
    else:
        found = f"found one for {', '.join(built.values())}" if built else "found none: its build says what it lacked"
    raise ImportError(
        f"infinicore needs _infinicore for {sys.implementation.cache_tag} in {PATH.parent}, {found}; "
        "build it with this Python: `pip install --force-reinstall --no-deps .`, or `make build` in a checkout."
    ) from None
