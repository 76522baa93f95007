"""Writes the Python code of README.md as one program, to be type-checked as its readers' code is.

python .ci/user_code.py PROGRAM: `make check-types` gives it to mypy.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def program(page: str) -> str:
    """The page's Python blocks, one behind the other."""
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert blocks, "the page has no Python code"
    return "\n".join(blocks)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(program((ROOT / "README.md").read_text()))
