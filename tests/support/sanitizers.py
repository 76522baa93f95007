"""Whether the tests run with a sanitizer: `make sanitize`."""

from pathlib import Path


def sanitized() -> bool:
    """Whether this process runs under AddressSanitizer or ThreadSanitizer, which keep memory that was freed."""
    maps = Path("/proc/self/maps")
    return maps.exists() and any(name in maps.read_text() for name in ("libasan", "libtsan"))
