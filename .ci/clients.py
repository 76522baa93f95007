"""Runs tests/test_serve_clients.py with each client of the server, which are installed in environments of their own.

    python .ci/clients.py FOLDER [PYTEST'S ARGUMENTS]

They cannot share one, for their requirements exclude each other. Each adds its packages to those of this environment. A
client that cannot be had is named; the exit status is 1 if a test failed or was skipped, or if none could be had.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Of each test of that name, the releases that docs/server.md names.
CLIENTS = {
    "litellm": ["litellm==1.110.2"],
    "langchain": ["langchain==1.5.2", "langchain-openai==1.7.4"],
    "openai_agents": ["openai-agents==0.24.0"],
    "pydantic_ai": ["pydantic-ai-slim[openai]==2.68.0"],
    "instructor": ["instructor==1.17.0"],
    "anthropics": ["anthropic==2.14.0"],
    "llm": ["llm==0.36"],
    "guidellm": ["guidellm==0.8.1"],
}
INSTALL = ["-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile", "--root-user-action", "ignore"]


def environment(folder: Path, packages: list[str]) -> Path | None:
    """Return the interpreter of an environment with these packages, made if need be; None: they cannot be had."""
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists() and ready.read_text() == repr(packages):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    beside = folder / "lib" / version / "site-packages" / "beside.pth"
    beside.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    if subprocess.run([python, *INSTALL, *packages]).returncode:
        return None
    ready.write_text(repr(packages))
    return python


def main(folder: Path, arguments: list[str]) -> int:
    missing, failed = [], []
    for name, packages in CLIENTS.items():
        python = environment(folder / name, packages)
        if python is None:
            missing.append(name)
            continue
        print(f"clients: {', '.join(packages)}", flush=True)
        options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-k", f"test_{name}"]
        command = [python, "-m", "pytest", *options, "tests/test_serve_clients.py", *arguments]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        if done.returncode or re.search(r"\d+ skipped", done.stdout):  # a package that is installed cannot be imported
            failed.append(name)
    for problem, names in (("could not be installed: pip's message is above", missing), ("failed or skipped", failed)):
        if names:
            print(f"clients: {', '.join(names)} {problem}")
    return int(bool(failed) or len(missing) == len(CLIENTS))


if __name__ == "__main__":
    sys.exit(main(Path(os.path.abspath(sys.argv[1])), sys.argv[2:]))
