"""The build and the set-up of .venv: what is compiled before there is a torch, what again, and what they say."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEADERS = ("check", "level_types", "parallel", "row_iterator", "scratch")  # which are precompiled
FILES = ("setup.py", "build_rules.py", "pyproject.toml", "README.md")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The build, with a few sources instead of ours."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    sources = {
        "torch_infini/__init__.py": '__version__ = "0"\n',
        **{f"csrc/common/{name}.h": "" for name in HEADERS},
        "csrc/common/two.h": "#define TWO 2\n",
        "csrc/common/two.cpp": '#include "two.h"\nint two() { return TWO; }\n',
        "csrc/infiniop/level_cpu.cpp": "int INFINI_LEVEL() { return 0; }\n",
        "csrc/infiniop/level_dot_cpu.cpp": "int INFINI_LEVEL() { return 0; }\n",
        "csrc/emulation/none.cpp": "#error not asked for\n",
        "csrc/infiniop/op_torch.cpp": "#error needs torch\n",
    }
    for name, text in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def build_kernels(
    checkout: Path, python: str | Path = sys.executable, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-W", "ignore", "setup.py", "-q", "build_kernels"]
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=checkout, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.full
def test_kernels_are_compiled_without_torch_and_once(checkout: Path) -> None:
    done = build_kernels(checkout)
    assert done.returncode == 0, done.stdout
    assert "torch_infini: compiled " in done.stdout
    native = checkout / "build" / "native"

    def objects() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in native.glob("*.o")}

    first = objects()
    lowest = "neon" if platform.machine() == "aarch64" else "baseline"
    assert {"common.two.o", f"infiniop.level_cpu.{lowest}.o", f"infiniop.level_dot_cpu.{lowest}.o"} <= first.keys()
    vnni = ("avx2_vnni", "avx512_vnni") if platform.machine() in ("x86_64", "AMD64") else ()
    assert {name for name in first if "_vnni" in name} == {f"infiniop.level_dot_cpu.{level}.o" for level in vnni}
    assert not any("torch" in name for name in first)
    assert build_kernels(checkout).stdout == ""
    assert objects() == first
    (checkout / "csrc" / "common" / "two.h").write_text("#define TWO 3\n")
    assert "torch_infini: compiled 1 files" in build_kernels(checkout).stdout
    assert {name for name, stamp in objects().items() if stamp != first[name]} == {"common.two.o"}
    (checkout / "csrc" / "common" / "two.cpp").write_text("#error broken on purpose\n")
    failed = build_kernels(checkout, MAX_JOBS="1")
    assert failed.returncode
    assert "broken on purpose" in failed.stdout
    assert failed.stdout.splitlines()[-1] == "torch_infini: the build failed; the compiler's messages are above."


@pytest.mark.full
def test_kernels_are_compiled_where_there_is_no_torch(checkout: Path) -> None:
    """Without fetching one: the set-up does that meanwhile."""
    venv.create(checkout / "venv", with_pip=False)
    (packages,) = (checkout / "venv" / "lib").glob("*/site-packages")
    for folder in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        for pattern in ("setuptools*", "_distutils_hack", "pkg_resources", "packaging*", "wheel*", "ninja*"):
            for found in folder.glob(pattern):
                (packages / found.name).symlink_to(found)
    done = build_kernels(checkout, checkout / "venv" / "bin" / "python", PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stdout
    assert "torch_infini: compiled " in done.stdout
    assert not (checkout / ".eggs").exists()


@pytest.mark.full
def test_flags_compile_everything_again(checkout: Path) -> None:
    (checkout / "csrc" / "common" / "two.cpp").write_text("#ifndef FROM_FLAGS\n#error no flag\n#endif\n")
    assert "no flag" in build_kernels(checkout).stdout
    done = build_kernels(checkout, CXXFLAGS="-DFROM_FLAGS")
    assert done.returncode == 0, done.stdout


def test_the_full_build_takes_the_same_kernels() -> None:
    """What is compiled while torch is downloaded has the same commands afterwards: nothing is compiled twice."""
    setup = runpy.run_path(str(ROOT / "build_rules.py"), run_name="test_setup")
    torch = setup["find_torch"]()
    without = setup["ninja_file"](None, None).split("\nbuild ")
    full = setup["ninja_file"](torch, None).split("\nbuild ")
    assert len(without) > 100
    missing = {edge.strip() for edge in without} - {edge.split("\ndefault ")[0].strip() for edge in full}
    assert not missing


RULES = runpy.run_path(str(ROOT / "build_rules.py"), run_name="test_setup")
PATHS = [path.relative_to(ROOT / "csrc") for pattern in ("*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(pattern)]


def test_every_kind_of_source_has_files() -> None:
    kinds = {RULES["kind_of"](path.as_posix()).name for path in PATHS}
    assert kinds == {kind.name for kind in RULES["KINDS"]}


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        ("sse2", "baseline"),
        ("avx2 fma", "baseline"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx_vnni", "avx2 avx2_vnni"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl", "avx512"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni", "avx512 avx512_vnni"),
        ("avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16", "avx512 avx512_vnni avx512_bf16"),
        (
            "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8",
            "avx512 avx512_vnni avx512_bf16 avx512_amx",
        ),
    ],
)
def test_levels_of_a_cpu(flags: str, levels: str) -> None:
    if not RULES["IS_X86"]:
        pytest.skip("flags of x86-64")
    assert RULES["levels_of"](set(flags.split())) == tuple(levels.split())


def edges(text: str) -> dict[str, str]:
    """The edges of a build.ninja by what they make."""
    blocks = text.split("\nbuild ")[1:]
    return {block.split(":", 1)[0]: block.split("\ndefault ")[0].strip() for block in blocks}


def test_the_demo_compiles_objects_of_the_whole() -> None:
    """A later build takes them; the choice of the level alone is compiled again."""
    torch = RULES["find_torch"]()
    levels = RULES["levels_of_this_cpu"]()
    demo, whole = (edges(RULES["ninja_file"](torch, None, some)) for some in (levels, ()))
    compiled = {name for name in demo if name.endswith(".o")}
    assert {name for name in compiled if whole.get(name) != demo[name]} == {"infinirt.cpu.capability.of_demo.o"}
    linked = " ".join(edge for edge in demo.values() if ": link " in edge)
    assert "infinicore" not in linked and "_c.o" not in linked and "device." not in linked
    kernels = {name.split(".")[-2] for name in re.findall(r"\S+_(?:cpu|tiles)\.\w+\.o", linked)}
    assert kernels == set(levels)


def test_a_library_of_the_demo_names_what_it_lacks(tmp_path: Path) -> None:
    """infinirt chooses no level that was not built, and says how to get it."""
    source = ROOT / "csrc" / "infinirt" / "cpu" / "capability.cpp"
    objects = [str(path) for path in (ROOT / "build" / "native").glob("infinirt.*.o") if "capability" not in path.name]
    objects += [
        str(ROOT / "build" / "native" / f"common.{name}.o") for name in ("check", "overlap", "new_output", "scratch")
    ]
    objects = [name for name in objects if ".cuda." not in name and ".emulated." not in name]
    library = tmp_path / "libinfinirt.so"
    include = [f"-I{ROOT}/csrc/{name}" for name in ("include", "common", "infiniop")]
    lowest = "neon" if platform.machine() == "aarch64" else "baseline"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-fopenmp", f'-DINFINI_BUILT_LEVELS="{lowest}"', *include]
    done = subprocess.run(
        [*command, str(source), *objects, "-o", str(library), "-pthread"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    code = f"""
import ctypes
rt = ctypes.CDLL({str(library)!r})
for name in ("infinirtCpuCapability", "infiniGetLastErrorMessage"):
    getattr(rt, name).restype = ctypes.c_char_p
print((rt.infinirtCpuCapability() or rt.infiniGetLastErrorMessage()).decode())
print(rt.infinirtCpuSetCapability(b"avx512_amx"), rt.infiniGetLastErrorMessage().decode())
"""

    def said(**environment: str) -> list[str]:
        env = {**os.environ, **environment}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.splitlines()

    chosen, refused = said(INFINI_CPU_CAPABILITY="", INFINI_EMULATE="")
    assert chosen == lowest
    assert refused.endswith(
        f"the CPU capability must be one of {lowest} on this machine in this build (`make build` builds all), "
        "got avx512_amx"
    )
    emulated, _ = said(INFINI_CPU_CAPABILITY="", INFINI_EMULATE="amx")
    assert emulated == (
        f"infini: INFINI_EMULATE=amx needs kernels that this build has not, only those for {lowest}: "
        "`make build` builds all"
    )


@pytest.mark.full
def test_what_the_demo_leaves_out_is_named(tmp_path: Path) -> None:
    """Where it is asked for, in one sentence; env lists it."""
    native = ROOT / "build" / "native"
    for name in set(RULES["DEMO_LIBRARIES"]) - {"libinfiniop"}:
        (tmp_path / f"{name}.so").symlink_to(native / f"{name}.so")
    edge = edges(RULES["ninja_file"](RULES["find_torch"](), None, RULES["levels_of_this_cpu"]()))["libinfiniop.so"]
    objects = [str(native / name) for name in re.findall(r"\S+\.o\b", edge)]
    exports = ROOT / "csrc" / "infiniop" / "exports.map"
    flags = ("-shared", "-fopenmp", "-Wl,-z,defs", f"-Wl,--version-script={exports}", f"-L{native}", "-linfinirt")
    linked = subprocess.run(
        ["g++", *objects, *flags, "-Wl,-rpath,$ORIGIN", "-o", str(tmp_path / "libinfiniop.so")], capture_output=True
    )
    assert linked.returncode == 0, linked.stderr.decode()
    sentence = "is not in this build, which has what `make demo` runs: `make build` builds the rest"

    def said(code: str) -> str:
        env = {**os.environ, "INFINI_LIBRARIES": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
        return (done.stdout + done.stderr).strip().splitlines()[-1]

    for module, subject in (
        ("torch_infini.compat.infinicore", "infinicore"),
        ("torch_infini.compat.libinfiniop", "the C interface of the ops"),
    ):
        assert said(f"import {module}") == f"ImportError: {subject} {sentence}"
    record = "import torch, torch_infini.runtime as r; r.record(torch.ops.infini.silu, torch.ones(4))"
    assert said(record) == f"ImportError: the recording of graphs, torch_infini.runtime.record, {sentence}"
    assert "not built: C interface, infinicore" in said("from torch_infini.commands import env; print(env.build())")
    assert said("from torch_infini.testing.ops import OP_INFOS; print(len(OP_INFOS) > 40)") == "True"  # as doctor does


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (None, "building needs a C++ compiler, and there is no 'a-compiler': "),
        ("echo '#define __GNUC__ 11'", "building needs g++ >= 12, and 'a-compiler' is g++ 11: "),
        ("echo it is broken >&2; exit 1", "'a-compiler' must be a C++ compiler, but it said: it is broken; "),
    ],
)
def test_the_compiler_is_checked_first(checkout: Path, script: str | None, sentence: str) -> None:
    if script:
        compiler = checkout / "bin" / "a-compiler"
        compiler.parent.mkdir()
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    path = f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = build_kernels(checkout, CXX="a-compiler", PATH=path)
    assert done.returncode == 1
    install = "install g++ >= 12 (Debian, Ubuntu: apt install g++) or set CXX."
    assert done.stdout.splitlines() == [f"torch_infini: {sentence}{install}"]


@pytest.mark.full
def test_two_builds_take_turns(checkout: Path) -> None:
    lock = checkout / "build" / "native" / "lock"
    lock.parent.mkdir(parents=True)
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_kernels"]
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == "torch_infini: another build is running here: waiting for its end\n"
        assert second.poll() is None
    assert "torch_infini: compiled " in second.communicate()[0]
    assert second.returncode == 0


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_goes_on(checkout: Path, number: signal.Signals) -> None:
    """What was compiled stays; the other objects are compiled by the next call."""
    slow = checkout / "csrc" / "common" / "three.cpp"
    slow.write_text('#include "slow.h"\n')
    os.mkfifo(slow.with_name("slow.h"))  # its compilation waits
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_kernels"]
    build = subprocess.Popen(
        command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    native = checkout / "build" / "native"
    end = time.monotonic() + 120
    while not (native / "common.two.o").is_file() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    os.killpg(build.pid, number)
    said = build.communicate()[0].decode()
    assert build.returncode
    if number == signal.SIGINT:
        assert said.splitlines()[-1] == (
            "torch_infini: the build was interrupted; the next one goes on where it ended."
        )
    with suppress(OSError):  # ninja's children are in groups of their own: the compiler still waits
        os.close(os.open(slow.with_name("slow.h"), os.O_WRONLY | os.O_NONBLOCK))
    stamp = (native / "common.two.o").stat().st_mtime_ns
    slow.with_name("slow.h").unlink()
    slow.with_name("slow.h").write_text("int three() { return 3; }\n")
    done = build_kernels(checkout)
    assert done.returncode == 0, done.stdout
    assert (native / "common.three.o").is_file()
    assert (native / "common.two.o").stat().st_mtime_ns == stamp


def test_a_full_disk_is_named(checkout: Path) -> None:
    compiler = checkout / "cxx"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *-dumpmachine*|*-dM*) exec g++ "$@" ;; esac\n'
        "echo 'error writing to a.s: No space left on device' >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    done = build_kernels(checkout, CXX=str(compiler))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("torch_infini: the build failed: a disk is full, that of ")


def test_pip_says_errors_and_no_warnings(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of a folder that is not there pip warns at every call."""
    set_up = runpy.run_path(str(ROOT / ".ci" / "set_up.py"), run_name="test_setup")["SetUp"](Path(sys.prefix))
    gone = {"PIP_FIND_LINKS": str(tmp_path / "gone"), "PIP_NO_INDEX": "1"}
    assert not set_up.pip("a-package-that-is-nowhere", **gone)
    said = capfd.readouterr().err
    assert "ERROR: No matching distribution found for a-package-that-is-nowhere" in said
    assert "WARNING" not in said
    command = [sys.executable, "-m", "pip", "install", "-q", "a-package-that-is-nowhere"]
    plain = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **gone})
    assert "WARNING" in plain.stderr, "pip no longer warns: this test says nothing"


def test_a_failed_compilation_ends_the_set_up() -> None:
    set_up = runpy.run_path(str(ROOT / ".ci" / "set_up.py"), run_name="test_setup")["SetUp"](Path(sys.prefix))
    set_up.compilation = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    start = time.monotonic()
    with pytest.raises(SystemExit):
        set_up.run("-c", "import time; time.sleep(600)")
    assert time.monotonic() - start < 500


@pytest.mark.full
def test_the_module_is_built_for_this_python(checkout: Path) -> None:
    """A wheel that has it is tagged for the Python that built it."""
    source = checkout / "csrc" / "infinicore" / "python" / "module.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("#include <pybind11/pybind11.h>\nPYBIND11_MODULE(_infinicore, module) { (void)module; }\n")
    done = build_kernels(checkout)
    assert done.returncode == 0, done.stdout
    assert (checkout / "build" / "native" / "infinicore.python.o").is_file()
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "bdist_wheel"]
    done = subprocess.run(
        command, cwd=checkout, env={**os.environ, "INFINI_BUILD": "0"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (checkout / "dist").iterdir()
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"torch_infini-0-{python}-{python}-linux_")


@pytest.mark.parametrize("missing", ["Python.h", "pybind11", "the target's Python"])
def test_the_module_is_left_out_by_name(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be built the rest is, and the build says why."""
    setup = runpy.run_path(str(ROOT / "build_rules.py"), run_name="test_setup")
    module_flags, ninja_file = setup["module_flags"], setup["ninja_file"]
    assert module_flags()[0] is not None and "infinicore.python" in ninja_file(None, None)
    if missing == "Python.h":
        monkeypatch.setattr(sysconfig, "get_path", lambda *_, **__: str(tmp_path))
        reason = f"Python's headers are missing in {tmp_path}: install python3-dev"
    elif missing == "pybind11":
        monkeypatch.setitem(module_flags.__globals__, "package_folder", lambda *_: None)
        reason = "pybind11 is missing: pip install pybind11"
    else:
        monkeypatch.setitem(module_flags.__globals__, "IS_CROSS", True)
        reason = f"a cross build for {platform.machine()} has no Python of that machine, and INFINI_PYTHONS names none"
    assert module_flags() == (None, reason)
    assert "infinicore.python" not in ninja_file(None, None)


def test_forced_cuda_says_what_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torch that has no CUDA, FORCE_CUDA builds kernels that this torch never calls."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("FORCE_CUDA", "1")
    choose_cuda = runpy.run_path(str(ROOT / "build_rules.py"), run_name="test_setup")["choose_cuda"]
    nvcc = str(tmp_path / "bin" / "nvcc")
    assert choose_cuda("13.0") == (nvcc, "FORCE_CUDA=1")
    assert choose_cuda(None)[0] == nvcc
    assert "this torch has no CUDA" in choose_cuda(None)[1]


def test_a_cross_build_needs_the_target_torch(tmp_path: Path) -> None:
    compiler = tmp_path / "riscv64-linux-gnu-g++"
    compiler.write_text("#!/bin/sh\necho riscv64-linux-gnu\n")
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "INFINI_TARGET_TORCH": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"torch_infini: {compiler} compiles for riscv64: INFINI_TARGET_TORCH must be the folder `torch` of an unpacked "
        "torch wheel for riscv64 (`pip download --platform` gets one)."
    )


def test_what_the_tests_for_aarch64_lack_is_named(tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / ".ci" / "aarch64.py"))
    command = [sys.executable, str(ROOT / ".ci" / "aarch64.py")]
    if platform.machine() == "aarch64":
        pytest.skip("it says that `make test` does it")
    done = subprocess.run(command, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert all(f" {package}" in done.stderr for package in script["TOOLS"].values()), done.stderr


def test_the_page_of_a_package_index(tmp_path: Path) -> None:
    """README.md goes into the package's metadata, without links that lead nowhere from there."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "torch_infini").mkdir()
    (tmp_path / "torch_infini" / "__init__.py").write_text('__version__ = "0"\n')
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "egg_info"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (metadata,) = tmp_path.glob("*.egg-info/PKG-INFO")
    text = metadata.read_text()
    assert "Description-Content-Type: text/markdown" in text and "make test" in text
    assert "docs/install.md" in text and "](docs/install.md)" in (ROOT / "README.md").read_text()
    assert not [line for line in text.splitlines() if "](" in line and "](http" not in line]


def test_the_package_ninja_is_needed(checkout: Path) -> None:
    """It writes build.ninja; a ninja of the system alone does not."""
    blocked = checkout / "blocked"
    blocked.mkdir()
    (blocked / "ninja.py").write_text("raise ImportError\n")
    done = build_kernels(checkout, PYTHONPATH=str(blocked))
    assert done.returncode == 1
    assert done.stdout == "torch_infini: building needs the Python package ninja: run `pip install ninja`.\n"
