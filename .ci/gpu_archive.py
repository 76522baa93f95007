"""Builds the libraries with CUDA kernels on a machine without a GPU, and packs them for one with a GPU (docs/gpu.md).

    python .ci/gpu_archive.py --torch 2.11.0 --archs 9.0 --out build/gpu/libraries.tar.xz      # make gpu-archive

Of that torch only headers and libraries are needed: it is unpacked below build/gpu without its dependencies, and never
imported. Ours know no Python and use torch's stable ABI: other releases of Python, and later torches, load them too;
only _infinicore, which is packed with them, is for the Python that runs this. They are built in a copy of the tree,
which leaves those in use here as they are, from the objects that were built here.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import lzma
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "gpu"
LIBRARIES = ("libinfinirt.so", "libinfiniop.so", "libinfiniccl.so", "libinfinicore_cpp_api.so", "libtorch_infini.so")
MODULE = "_infinicore."  # what the name of its module begins with; built for one release of Python, or not at all
DIGEST = "sources.sha256"


def unpacked_torch(release: str, place: Path = PLACE) -> Path:
    """The folder to import that release of torch from, a build with CUDA; downloads it, half a gigabyte, if needed."""
    folder = place / f"torch-{release}"
    version = folder / "torch" / "version.py"
    if not version.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        print(f"gpu-archive: unpacking torch {release} into {folder.relative_to(ROOT)}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-compile"]
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        if subprocess.run([*pip, "--target", str(partial), f"torch=={release}"]).returncode:
            sys.exit(f"gpu-archive: torch {release} could not be installed: what pip said is above")
        partial.rename(folder)
    if not runpy.run_path(str(version))["cuda"]:
        sys.exit(
            f"gpu-archive: torch {release} must have CUDA, but pip found a CPU build: remove {folder} and point pip to "
            "another index (PIP_INDEX_URL)"
        )
    return folder


def copied_tree(place: Path = PLACE) -> Path:
    """A copy of the tree below `place`, times kept, with the objects of earlier builds, which are then not compiled."""
    tree = place / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    for old in tree.iterdir():
        if old.name != "build":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "csrc", "torch_infini"]
    names = subprocess.run(listing, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.split("\0")
    for name in (*filter(None, names), "setup.py", "build_rules.py", "pyproject.toml", "README.md"):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    native = ROOT / "build" / "native"
    if native.is_dir() and not (tree / "build" / "native").exists():
        shutil.copytree(
            native, tree / "build" / "native", ignore=shutil.ignore_patterns("emulated", "*.emulated.o", "*.so")
        )
    return tree


def digest_of_sources(tree: Path) -> str:
    """Tells whether libraries were built from these sources."""
    digest = hashlib.sha256()
    for path in sorted(path for path in (tree / "csrc").rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(tree)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def pack(folder: Path, digest: str, archive: Path) -> None:
    """The libraries of a folder in one compressed archive, a third of their size, with the digest of their sources."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=6) as tar:
        for library in (*LIBRARIES, *sorted(path.name for path in folder.glob(f"{MODULE}*.so"))):
            tar.add(folder / library, library)
        note = tarfile.TarInfo(DIGEST)
        note.size = len(digest)
        tar.addfile(note, io.BytesIO(digest.encode()))


def unpack(archive: Path, digest: str, folder: Path) -> None:
    """The libraries of an archive into a folder; ValueError unless pack() made it of sources with this digest."""
    try:
        with tarfile.open(archive) as tar:
            files = {m.name: file.read() for m in tar.getmembers() if (file := tar.extractfile(m))}
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{archive} must be an archive of `make gpu-archive`, but cannot be read: {error}") from error
    if {name for name in files if not name.startswith(MODULE) or "/" in name} != {*LIBRARIES, DIGEST}:
        names = ", ".join(sorted(files)[:8])
        raise ValueError(
            f"{archive} must be an archive of `make gpu-archive`, with {', '.join(LIBRARIES)}, got {names}"
        )
    if files.pop(DIGEST).decode() != digest:
        raise ValueError(f"{archive} must be of the sources that are here, but others were packed: make it again")
    folder.mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        (folder / name).write_bytes(contents)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="2.11.0", help="the release to build against, of the index that pip asks")
    parser.add_argument("--archs", default="9.0", help='as in TORCH_CUDA_ARCH_LIST: "8.0;9.0+PTX"')
    parser.add_argument("--out", type=Path, default=PLACE / "libraries.tar.xz")
    options = parser.parse_args(arguments)
    if not shutil.which("nvcc") and "CUDA_HOME" not in os.environ:
        sys.exit("gpu-archive: no nvcc was found: put it on PATH or set CUDA_HOME")
    torch = unpacked_torch(options.torch)
    tree = copied_tree()
    environment = {**os.environ, "TORCH_CUDA_ARCH_LIST": options.archs, "PYTHONPATH": str(torch)}
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"]
    if subprocess.run(command, cwd=tree, env=environment).returncode:
        sys.exit("gpu-archive: the build failed; what it said is above")
    pack(tree / "torch_infini" / "lib", digest_of_sources(tree), options.out)
    print(
        f"gpu-archive: {options.out}, {options.out.stat().st_size / 1e6:.1f} MB: torch {options.torch}, {options.archs}"
    )


if __name__ == "__main__":
    main()
