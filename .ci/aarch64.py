"""Builds the libraries for aarch64 with a cross compiler and runs a part of the tests under qemu: make test-aarch64.

All of it lies in build/aarch64: the libraries, system/ (an arm64 Python from the distribution's packages), packages/
(torch and what the tests import, from the registry that pip uses). A second call does only what is missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "aarch64"
SYSTEM, PACKAGES = BUILD / "system", BUILD / "packages"
COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64"
TOOLS = {COMPILER: "g++-aarch64-linux-gnu", QEMU: "qemu-user", "apt-get": "apt", "dpkg-deb": "dpkg"}  # their packages

# qemu's models of CPUs, and the level that each must choose.
CPUS = {"max": "neon_bf16", "neoverse-n1": "neon_dotprod", "cortex-a72": "neon"}

# What the tests below import, and what that imports; packages of Python alone and of compiled code.
IMPORTED = (
    *("torch", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy", "typing-extensions"),
    *("pytest", "iniconfig", "packaging", "pluggy", "pygments", "expecttest", "numpy", "safetensors"),
)

# The CPUs that the tests run on. On the last, with the lowest level, run those that need no products of torch's own,
# since its libraries take Armv8.1-A for granted.
WITHOUT_PRODUCTS = "test_reference and (norm or silu or swiglu or softmax or rope or embedding or add or clip)"

# Every op against its float64 reference, through torch and through the C interface; the same bits on 1 and on 2
# threads, alone and in a batch. What starts other processes is left out: they would be no arm64 ones.
TESTS = (
    ("tests/test_ops.py", "test_reference or (test_threads and bfloat16)"),
    ("tests/test_infiniop.py", "test_reference or thread"),
    ("tests/test_linear.py", "bits or reference or batch"),
    ("tests/test_linear_packed.py", "bits or passes"),
    ("tests/test_fused_linear.py", "bits"),
    ("tests/test_matmul.py", "bits or batch"),
    ("tests/test_quantize.py", "bits or batch"),
    ("tests/test_paged_attention.py", "bits or batch"),
    ("tests/test_library.py", "has_capability or capability_scope"),
    ("tests/test_infiniccl.py", "reduce"),
)


def main() -> None:
    if platform.machine() == "aarch64":
        sys.exit("make test-aarch64: this machine is aarch64 itself: run `make test`")
    check_tools()
    get_system()
    get_packages()
    write_substitutes()
    build()
    for cpu, level in CPUS.items():
        check_level(cpu, level)
    run_tests()


def check_tools() -> None:
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        packages = " ".join(TOOLS[tool] for tool in missing)
        sys.exit(
            f"make test-aarch64: {', '.join(missing)} must be installed: "
            f"on Debian and Ubuntu `apt-get install {packages}` does it"
        )


def run(*command: str | Path, **options: object) -> str:
    """What a command prints; exits with all that it said if it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=BUILD, **options)  # type: ignore[call-overload]
    if done.returncode:
        sys.exit(f"make test-aarch64: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def get_system() -> None:
    """An arm64 Python with the libraries that it needs, unpacked, not installed; with a separate state of apt."""
    if (SYSTEM / ".ready").is_file():
        return
    print("make test-aarch64: fetching an arm64 Python with apt-get", flush=True)
    state = BUILD / "apt"
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    (state / "config").write_text(
        'APT::Architecture "arm64";\nAPT::Architectures { "arm64"; };\nAPT::Sandbox::User "";\n'
        f'Dir::State "{state}";\nDir::State::status "{state}/status";\nDir::State::lists "{state}/lists";\n'
        f'Dir::Cache "{state}";\nDir::Cache::archives "{state}/archives";\nDebug::NoLocking "true";\n'
    )
    environment = {**os.environ, "APT_CONFIG": str(state / "config")}
    run("apt-get", "update", env=environment)
    packages = ("python3", "libgomp1", "libstdc++6", "zlib1g")
    run("apt-get", "install", "--download-only", "--no-install-recommends", "-y", *packages, env=environment)
    for package in sorted((state / "archives").glob("*.deb")):
        run("dpkg-deb", "-x", package, SYSTEM)
    # qemu opens these instead of the machine's own, which torch's libraries could not parse.
    cores = "".join(
        f"processor\t: {core}\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
        "CPU variant\t: 0x0\nCPU part\t: 0xd08\nCPU revision\t: 3\n\n"
        for core in range(os.cpu_count() or 1)
    )
    (SYSTEM / "proc").mkdir(exist_ok=True)
    (SYSTEM / "proc" / "cpuinfo").write_text(cores)
    (SYSTEM / ".ready").touch()


def system_python() -> Path:
    return next(path for path in (SYSTEM / "usr" / "bin").glob("python3.*") if re.fullmatch(r"python3\.\d+", path.name))


def get_packages() -> None:
    """The releases that this environment has, and torch's CPU build where pip knows one."""
    if (PACKAGES / ".ready").is_file():
        return
    print("make test-aarch64: fetching torch and the tests' packages for aarch64 with pip", flush=True)
    release = lambda name: importlib.metadata.version(name).partition("+")[0]  # noqa: E731
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 26, 24, 17)]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--root-user-action=ignore"]
    pip += ["--no-deps", "--only-binary=:all:", *platforms, f"--python-version={system_python().name[6:]}"]
    pip += ["--target", str(PACKAGES)]
    others = [f"{name}=={release(name)}" for name in IMPORTED if name not in ("torch", "markupsafe")]
    run(*pip, *others, "markupsafe")
    torch = f"torch=={release('torch')}"
    if subprocess.run([*pip, f"{torch}+cpu"], capture_output=True).returncode:
        run(*pip, torch)
    (PACKAGES / ".ready").touch()


def write_substitutes() -> None:
    """Libraries in place of CUDA's, for a torch that was built with it: none of their functions is ever called."""
    folder = BUILD / "stand-ins"
    if (folder / ".ready").is_file():
        return
    there = {path.name: path for path in (PACKAGES / "torch" / "lib").glob("*.so*")}
    needed: set[str] = set()
    versions: dict[str, set[str]] = {}  # that are asked of a library
    symbols: dict[str, set[str]] = {}  # of a version; "": of none
    for path in there.values():
        needed |= set(re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", path)))
        for part in run("readelf", "-W", "-V", path).split("File: ")[1:]:
            versions.setdefault(part.split()[0], set()).update(re.findall(r"Name: (\S+) +Flags", part))
        for line in run("aarch64-linux-gnu-nm", "-D", "--undefined-only", path).splitlines():
            name, _, version = line.split()[-1].partition("@")
            symbols.setdefault(version.lstrip("@"), set()).add(name)
    folder.mkdir(exist_ok=True)
    unversioned = {name for name in symbols.get("", set()) if re.match(r"(__)?(cu|nv|nccl)", name)}
    for library in sorted(name for name in needed - set(there) if re.match(r"lib(cu|nv|nccl)", name)):
        exported = {version: symbols.get(version, set()) for version in versions.get(library, set())}
        names = set().union(*exported.values(), unversioned if library.startswith("libcudart") else set())
        (folder / "functions.c").write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names)))
        nodes = [f"{v} {{ global: {''.join(f'{n}; ' for n in sorted(names))}}};\n" for v, names in exported.items()]
        (folder / "versions").write_text("".join(nodes))
        script = ["-Wl,--version-script=versions"] if exported else []
        command = [COMPILER, "-x", "c", "-w", "-shared", "-fPIC", "functions.c", f"-Wl,-soname,{library}", *script]
        subprocess.run([*command, "-o", library], cwd=folder, check=True)
    (folder / ".ready").touch()


def build() -> None:
    environment = {**os.environ, "CXX": COMPILER, "INFINI_TARGET_TORCH": str(PACKAGES / "torch")}
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


def emulated(cpu: str, *arguments: str, threads: int = 2) -> list[str]:
    """The command that runs the arm64 Python with these arguments on this model of a CPU."""
    variables = {
        "LD_LIBRARY_PATH": BUILD / "stand-ins",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{PACKAGES}",
        "INFINI_LIBRARIES": BUILD,
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
    }
    settings = [part for name, value in variables.items() for part in ("-E", f"{name}={value}")]
    return [QEMU, "-cpu", cpu, "-L", str(SYSTEM), *settings, str(system_python()), *arguments]


def check_level(cpu: str, level: str) -> None:
    code = "import torch_infini as t; print(t.cpu_capability(), *t.cpu_capabilities())"
    *_, line = run(*emulated(cpu, "-W", "ignore", "-c", code)).splitlines()
    levels = list(CPUS.values())[::-1]
    expected = f"{level} {' '.join(levels[: levels.index(level) + 1])}"
    if line != expected:
        sys.exit(f"make test-aarch64: on {cpu} the level and those below must be {expected}, got {line}")
    print(f"make test-aarch64: qemu's {cpu} has level {level}", flush=True)


def run_tests() -> None:
    """At all levels on the first CPU; on the last one at the lowest, which there must do with its instructions."""
    wanted = " or ".join(f"({Path(file).stem} and ({names}))" for file, names in TESTS)
    most = ([file for file, _ in TESTS], wanted)
    few = (["tests/test_ops.py"], WITHOUT_PRODUCTS)
    pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", *sys.argv[1:]]
    running = []
    for cpu, (files, names) in ((next(iter(CPUS)), most), (list(CPUS)[-1], few)):
        report = BUILD / f"tests-{cpu}.txt"
        with report.open("w") as output:
            command = emulated(cpu, *pytest, *files, "-k", names)
            running.append((cpu, report, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)))
    failed = [cpu for cpu, _, process in running if process.wait()]
    for cpu, report, _ in running:
        print(f"--- qemu, {cpu}\n{report.read_text()}")
    if failed:
        sys.exit(f"make test-aarch64: tests failed on {' and '.join(failed)}")


if __name__ == "__main__":
    main()
