"""The pages for contributors followed word for word.

docs/new-op.md in a copy of the tree: it builds, and its tests pass. docs/new-device.md against a made-up driver: it
runs beside the CPU. The format of docs/checkpoints.md in a copy of the tree: both doors read it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def blocks(page: str) -> list[tuple[str, str]]:
    """(path, text) of the page's files."""
    return re.findall(r"```\w+ (\S+)\n(.*?)```", (ROOT / page).read_text(), re.S)


@pytest.mark.full
def test_add_an_op(tmp_path: Path) -> None:
    # With the objects built so far (times kept), so that only the new op is compiled.
    for folder in ("csrc", "torch_infini", "tests", "build", "docs", "benchmarks", ".ci"):
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            ignore=shutil.ignore_patterns("__pycache__", "model", "sanitized", "peers", "gpu"),
        )
    for file in (
        "setup.py",
        "build_rules.py",
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ):
        shutil.copy2(ROOT / file, tmp_path / file)
    files = blocks("docs/new-op.md")
    assert len(files) == 7
    for name, text in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def done(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), **more}
        command = [sys.executable, "-W", "ignore", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    def run(*arguments: str, **more: str) -> None:
        result = done(*arguments, **more)
        assert result.returncode == 0, result.stdout + result.stderr

    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    run("setup.py", "-q", "build_ext", "--inplace", INFINI_EMULATION="1")
    run(".ci/docs.py")
    assert "`scale`" in (tmp_path / "docs" / "ops.md").read_text()
    assert "import scale as scale" in (tmp_path / "torch_infini" / "ops" / "__init__.pyi").read_text()
    # The tests of the new op, and of its files, and what looks at the pages and at the registry as a whole.
    whole = "test_arrows or line_each or stub_names or up_to_date or one_machine"
    about = [f"tests/test_{name}.py" for name in ("ops", "docs", "arrows")]
    run(*tests, *about, "-k", f"scale and not scaled or {whole}")
    emulated = str(tmp_path / "build/native/emulated")
    run(*tests, "tests/test_cuda.py", "-k", "scale and not scaled", INFINI_LIBRARIES=emulated)

    # These checks bite: each fault fails the one that is for it.
    plant(tmp_path / "docs" / "ops.md", r"\n\| `scale` .*", "")
    missing = done(".ci/docs.py", "--check")
    assert missing.returncode == 1 and "docs/ops.md" in missing.stdout + missing.stderr, missing
    plant(
        tmp_path / "torch_infini" / "ops" / "scale.py",
        "fake=like_first",
        "fake=lambda x, *others: x.new_empty(x.shape[:-1])",
    )
    plant(tmp_path / "torch_infini" / "ops" / "scale.py", "    Source: none needed.\n", "")
    plant(tmp_path / "torch_infini" / "testing" / "ops" / "scale.py", "x.double[(][)] [*] factor", "x.double()")
    plant(tmp_path / "torch_infini" / "testing" / "ops" / "scale.py", "a finite number, got nan", "finite, got nan")
    chosen = ["opcheck", "complete", "reference and float32 and avx2", "errors"]
    broken = done(*tests, "tests/test_ops.py", "-k", f"scale and not scaled and ({' or '.join(chosen)})")
    failed = set(re.findall(r"^FAILED tests/test_ops\.py::(\w+)", broken.stdout, re.M))
    assert failed == {"test_opcheck", "test_complete", "test_reference", "test_errors"}, broken.stdout


def plant(path: Path, pattern: str, fault: str) -> None:
    """Replace the one match of a pattern in a file."""
    text, count = re.subn(pattern, fault, path.read_text())
    assert count == 1, f"{path.name}: {count} times {pattern}"
    path.write_text(text)


# Writes a folder in the format of the page, and compares what both doors make of it with the dense model.
READ = """
import json, sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import torch_infini
from torch_infini.checkpoints.formats import nf4
from torch_infini.models import Llama
from torch_infini.testing.checkpoints import random_model

folder = Path(sys.argv[1])
assert folder in Path(torch_infini.__file__).parents
dense = random_model("llama", intermediate_size=128)
tensors = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
values = torch.tensor(nf4._VALUES, dtype=torch.float64)
for name, module in dense.model.named_modules():
    if isinstance(module, torch.nn.Linear):
        groups = tensors.pop(f"model.{name}.weight").unflatten(1, (-1, 64))
        absmax = groups.abs().amax(-1)
        codes = ((groups / absmax[..., None])[..., None] - values).abs().argmin(-1)
        module.weight.data = (values[codes] * absmax[..., None]).flatten(1).float()
        codes = codes.flatten(1).byte()
        tensors |= {f"model.{name}.codes": codes[:, 0::2] | codes[:, 1::2] << 4, f"model.{name}.absmax": absmax}
model = folder / "model"
model.mkdir()
save_file(tensors, model / "model.safetensors")
config = dense.config.to_dict() | {"quantization_config": {"quant_method": "nf4", "blocksize": 64}}
(model / "config.json").write_text(json.dumps(config, default=str))

ids = torch.tensor([[7, 3, 300, 12, 9]])
with torch.no_grad():
    expected = dense(ids).logits
    found = torch_infini.load(model, torch.float32)(ids).logits
assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
llama = Llama.from_pretrained(model, dtype=torch.float32, progress=False)
assert torch.equal(llama.layers[1].mlp.down.dense(), dense.model.layers[1].mlp.down_proj.weight)
output = torch_infini.LLM(model, dtype="float32", progress=False).generate(
    [ids[0].tolist()], torch_infini.SamplingParams(max_tokens=4, temperature=0)
)[0]
assert output.token_ids == dense.generate(ids, max_new_tokens=4, do_sample=False)[0, 5:].tolist()

config["quantization_config"]["blocksize"] = 32
(model / "config.json").write_text(json.dumps(config, default=str))
for read in (torch_infini.load, torch_infini.LLM):
    try:
        read(model)
    except ValueError as error:
        assert "quantization_config.blocksize in" in str(error) and "must be 64, got 32" in str(error), error
    else:
        raise AssertionError(read)
"""


@pytest.mark.full
def test_add_a_checkpoint_format(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "torch_infini",
        tmp_path / "torch_infini",
        ignore=shutil.ignore_patterns("__pycache__"),
        copy_function=os.symlink,  # Python takes a module's package from the path of the link
    )
    ((name, text),) = blocks("docs/checkpoints.md")
    assert not (tmp_path / name).exists()
    (tmp_path / name).write_text(text)
    command = [sys.executable, "-W", "ignore", "-c", READ, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Two devices with the host's memory, and with streams that do everything at once.
DRIVER = """
#include <cstdlib>
#include <cstring>
typedef int qyError_t;
enum { qySuccess = 0, qyErrorMemory = 2 };
enum qyMemcpyKind { qyMemcpyHostToHost = 5, qyMemcpyHostToDevice, qyMemcpyDeviceToHost, qyMemcpyDeviceToDevice };
typedef void *qyStream_t;
static thread_local int current = -1;
inline const char *qyGetErrorString(qyError_t) { return "a made-up error"; }
inline qyError_t qyGetDeviceCount(int *count) { *count = 2; return qySuccess; }
inline qyError_t qySetDevice(int device) { current = device; return qySuccess; }
extern "C" __attribute__((used)) inline int qyCurrentDevice() { return current; }
inline qyError_t qyDeviceSynchronize() { return current == 1 ? qySuccess : 99; }
inline qyError_t qyStreamCreate(qyStream_t *stream) { *stream = std::malloc(1); return qySuccess; }
inline qyError_t qyStreamDestroy(qyStream_t stream) { std::free(stream); return qySuccess; }
inline qyError_t qyStreamSynchronize(qyStream_t) { return qySuccess; }
inline qyError_t qyMalloc(void **ptr, size_t size) {
    *ptr = size < 1 << 20 && current == 1 ? std::malloc(size) : nullptr;
    return *ptr == nullptr ? qyErrorMemory : qySuccess;
}
inline qyError_t qyMallocHost(void **ptr, size_t size) { return qyMalloc(ptr, size); }
inline qyError_t qyFree(void *ptr) { std::free(ptr); return qySuccess; }
inline qyError_t qyFreeHost(void *ptr) { return qyFree(ptr); }
inline qyError_t qyMemcpy(void *dst, const void *src, size_t size, qyMemcpyKind kind) {
    std::memcpy(dst, src, size);
    return kind == qyMemcpyHostToDevice || kind == qyMemcpyDeviceToHost ? qySuccess : 99;
}
inline qyError_t qyMemcpyAsync(void *dst, const void *src, size_t size, qyMemcpyKind kind, qyStream_t) {
    return qyMemcpy(dst, src, size, kind);
}
"""


def test_bring_up_a_device(tmp_path: Path) -> None:
    ((name, text),) = blocks("docs/new-device.md")
    (tmp_path / "qy_runtime.h").write_text(DRIVER)
    source = tmp_path / name
    source.parent.mkdir(parents=True)
    source.write_text(text)
    shutil.copy2(ROOT / "csrc" / "infinirt" / "backend.h", source.parent.parent)
    library = tmp_path / "libwithqy.so"
    objects = sorted(str(o) for o in (ROOT / "build" / "native").glob("infinirt.*.o") if "cuda" not in o.name)
    flags = "-std=c++17 -Wall -Wextra -Werror -fPIC -fopenmp -shared -Icsrc/include -Icsrc/common"
    environment = [
        os.environ.get(name, default) for name, default in (("CXX", "g++"), ("CXXFLAGS", ""), ("LDFLAGS", ""))
    ]
    command = [
        *shlex.split(" ".join((*environment, flags))),
        f"-I{tmp_path}",
        str(source),
        *objects,
        "-o",
        str(library),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    rt, qy, cpu = ctypes.CDLL(str(library)), 9, 0
    rt.infiniGetLastErrorMessage.restype = ctypes.c_char_p
    stream, memory, host, event = (ctypes.c_void_p() for _ in range(4))

    def fails(status: int, sentence: str) -> None:
        assert (status, rt.infiniGetLastErrorMessage().decode()) == (status, sentence)
        assert status != 0

    counts = (ctypes.c_int * 10)()
    assert rt.infinirtGetAllDeviceCount(counts) == 0
    assert list(counts) == [1] + [0] * 8 + [2]
    sentence = "infinirtSetDevice: device_id must be less than the number of devices (qy has 2), got 2"
    fails(rt.infinirtSetDevice(qy, 2), sentence)
    assert rt.infinirtSetDevice(qy, 0) == 0
    fails(rt.infinirtDeviceSynchronize(), "qyDeviceSynchronize: a made-up error")
    fails(rt.infinirtMalloc(ctypes.byref(memory), 8), "infinirtMalloc: no memory for 8 bytes on qy 0")
    assert rt.infinirtSetDevice(qy, 1) == 0
    assert rt.qyCurrentDevice() == 1
    fails(rt.infinirtSetDevice(qy, 2), sentence)
    device, number, of_thread = ctypes.c_int(), ctypes.c_int(), []
    assert rt.infinirtGetDevice(ctypes.byref(device), ctypes.byref(number)) == 0
    assert (device.value, number.value) == (qy, 1)  # what failed has changed nothing

    def another_thread() -> None:
        assert rt.infinirtGetDevice(ctypes.byref(device), None) == 0
        of_thread.append(device.value)

    thread = threading.Thread(target=another_thread)
    thread.start()
    thread.join()
    assert of_thread == [cpu]

    assert rt.infinirtStreamCreate(ctypes.byref(stream)) == 0
    assert rt.infinirtMalloc(ctypes.byref(memory), 8) == 0
    assert rt.infinirtMallocHost(ctypes.byref(host), 8) == 0

    data, result = ctypes.create_string_buffer(b"1234567", 8), ctypes.create_string_buffer(8)
    assert rt.infinirtMemcpy(memory, data, ctypes.c_size_t(8), 1) == 0
    assert rt.infinirtMemcpyAsync(result, memory, ctypes.c_size_t(8), 2, stream) == 0
    assert result.raw == data.raw
    assert rt.infinirtMemcpyAsync(result, memory, ctypes.c_size_t(9), 2, stream) == 3

    absent = ": the backend of qy does not implement this function"
    fails(rt.infinirtEventCreate(ctypes.byref(event)), "infinirtEventCreate" + absent)
    fails(rt.infinirtStreamBeginCapture(stream, 0), "infinirtStreamBeginCapture" + absent)
    fails(rt.infinirtMallocAsync(ctypes.byref(event), 8, stream), "infinirtMallocAsync" + absent)
    fails(rt.infinirtFreeAsync(memory, stream), "infinirtFreeAsync" + absent)

    # With another device current: handles and host memory know theirs, device memory is that of the current one.
    assert rt.infinirtSetDevice(cpu, 0) == 0
    assert rt.infinirtEventCreate(ctypes.byref(event)) == 0
    fails(
        rt.infinirtEventRecord(event, stream),
        "infinirtEventRecord: event and stream must be of one device type, got cpu and qy",
    )
    fails(
        rt.infinirtStreamWaitEvent(stream, event),
        "infinirtStreamWaitEvent: stream and event must be of one device type, got qy and cpu",
    )
    assert rt.infinirtStreamSynchronize(stream) == 0
    assert rt.infinirtStreamDestroy(stream) == 0
    assert rt.infinirtFreeHost(host) == 0
    assert rt.infinirtFree(memory) == 3
    assert rt.infinirtSetDevice(qy, 1) == 0
    assert rt.infinirtFree(memory) == 0
    assert rt.infinirtFree(memory) == 3
