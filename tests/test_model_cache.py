"""Models in the folder INFINI_CACHE: the bits of a model that was built, and folders, files and processes that fail."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.checkpoint_writers import CASES, write_folder, write_gguf
from support.fresh_python import run_python
from torch_infini import LLM, SamplingParams
from torch_infini.models import Llama, cache
from torch_infini.nn import Batch
from torch_infini.testing.checkpoints import random_model
from torch_infini.weights import best

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [7, 3, 300, 12, 9, 9, 41, 5]
# Reads a model in another process and prints its logits.
PROGRAM = """
import sys
import torch
torch.set_num_threads(1)
sys.path.insert(0, "tests")
from test_model_cache import logits
from torch_infini.models import Llama, cache
{before}
model = Llama.from_pretrained(sys.argv[1], progress=False)
print(logits(model).float().flatten()[:50].tolist())
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    random_model("llama", torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint that may be changed."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in saved.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INFINI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Llama]:
    """The models that were read from a checkpoint."""
    made: list[Llama] = []
    original = Llama._from_files

    def counting(*arguments: Any) -> Llama:
        made.append(original(*arguments))
        return made[-1]

    monkeypatch.setattr(Llama, "_from_files", counting)
    return made


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns what was logged as warnings since it was last asked."""

    def taken() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name == "torch_infini" and r.levelno == logging.WARNING]
        caplog.clear()
        return found

    return taken


def read(folder: Path, *arguments: Any, **options: Any) -> Llama:
    return Llama.from_pretrained(folder, *arguments, progress=False, **options)


def logits(model: Llama) -> Tensor:
    count = len(TOKENS)
    positions, starts = torch.arange(count), torch.tensor([0, count])
    batch = Batch(torch.tensor(TOKENS), positions, positions, torch.tensor([[0]]), torch.tensor([count]), starts)
    with torch.inference_mode():
        return model(batch, model.new_cache(1, 16))


def entries(root: Path) -> list[Path]:
    return sorted((root / "models").glob("*.model"))


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    every = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return ((name, tensor) for name, tensor in every)


def assert_same(mapped: Llama, built: Llama) -> None:
    """Equal in all but where the memory is."""
    assert mapped.config == built.config
    assert mapped.dtype == built.dtype and mapped.bytes_per_step == built.bytes_per_step
    theirs = dict(built.named_modules(remove_duplicate=False))
    of_modules = {*vars(nn.Module())}
    for name, module in mapped.named_modules(remove_duplicate=False):
        other = theirs.pop(name)
        assert type(module) is type(other)
        own, expected = ({k: v for k, v in vars(m).items() if k not in of_modules} for m in (module, other))
        assert own == expected, name
        assert module.training == built.training
        assert module._non_persistent_buffers_set == other._non_persistent_buffers_set
    assert not theirs
    of_mapped, of_built = dict(named_tensors(mapped)), dict(named_tensors(built))
    assert list(of_mapped) == list(of_built)
    first: dict[int, str] = {}
    for name, tensor in of_built.items():
        other = of_mapped[name]
        assert type(other) is type(tensor) and other.requires_grad == tensor.requires_grad
        assert other.dtype == tensor.dtype and other.stride() == tensor.stride()
        assert torch.equal(other, tensor), name
        assert other is of_mapped[first.setdefault(id(tensor), name)]  # one parameter where there was one
    assert torch.equal(logits(mapped), logits(built))


@pytest.mark.parametrize("weights", ["dense", "packed", "int8", "int4", "group8", "table4"], indirect=True)
@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "qwen3", "mistral", "llama3"])
def test_bits(
    name: str, weights: Any, tmp_path: Path, root: Path, builds: list[Llama], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every format; "packed" as where dense weights are packed by themselves."""
    random_model(name, torch.bfloat16).save_pretrained(tmp_path / "model")
    if weights in ("dense", "packed"):
        monkeypatch.setattr("torch_infini.models.llama.fastest", lambda *arguments: weights)
    asked = "dense" if weights == "packed" else weights
    built = read(tmp_path / "model", asked)
    mapped = read(tmp_path / "model", asked)
    assert builds == [built] and len(entries(root)) == 1
    assert mapped.layers[0].mlp.down.format == (best(weights, "cpu").name if asked == weights != "dense" else weights)
    assert mapped.shares_embedding == (name == "llama-biases-tied" and asked == "dense")
    assert_same(mapped, built)


@pytest.mark.parametrize("name", ["awq", "gptq-act-order"])
def test_bits_of_other_libraries(name: str, tmp_path: Path, root: Path, builds: list[Llama]) -> None:
    write_folder(tmp_path / "model", CASES[name])
    built, mapped = read(tmp_path / "model"), read(tmp_path / "model")
    assert builds == [built]
    assert (mapped.layers[0].mlp.down.columns is not None) == (name == "gptq-act-order")
    assert_same(mapped, built)


def test_bits_of_merged_layers(tmp_path: Path, root: Path, builds: list[Llama]) -> None:
    """A GGUF file whose v has another format than q and k; their biases are views of one."""
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    write_gguf(file, lambda module: "Q8_0" if module.endswith("v_proj") else "Q4_0", "qwen2")
    built, mapped = read(file), read(file)
    assert builds == [built]
    qkv = mapped.layers[0].attention.qkv
    assert qkv.format == "merged"
    assert qkv.parts[0].bias.data_ptr() == qkv.bias.data_ptr()
    assert_same(mapped, built)


def test_two_ranks(folder: Path, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each rank has an entry of its own; LLM says that it read one, and in what time."""
    caplog.set_level(logging.INFO, "torch_infini")
    params = SamplingParams.greedy(max_tokens=8, logprobs=3)
    found = []
    for _ in range(2):
        llm = LLM(folder, tensor_parallel_size=2, dtype="float32")
        (output,) = llm.generate([TOKENS], params)
        found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
        del llm
    assert found[0] == found[1]
    assert len(entries(root)) == 2
    (said,) = [r.getMessage() for r in caplog.records if "from the cache" in r.getMessage()]
    assert re.fullmatch(
        rf"torch_infini\.models\.Llama: {folder} from the cache, {root}/models/\w+\.model, in .* s", said
    )
    LLM(folder, dtype="float32")
    assert len(entries(root)) == 3


def test_without_the_variable(folder: Path, root: Path, builds: list[Llama], monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, ""):
        monkeypatch.delenv("INFINI_CACHE") if value is None else monkeypatch.setenv("INFINI_CACHE", value)
        read(folder), read(folder)
    assert len(builds) == 4 and not root.exists()


def test_what_makes_another_entry(
    folder: Path, root: Path, builds: list[Llama], monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    read(folder)
    read(folder, "int8")
    read(folder, "dense", "float32")
    assert read(folder, "dense", "float16").head.weight.dtype == torch.float16
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(text) | {"rms_norm_eps": 0.5}))
    assert read(folder).norm.eps == 0.5
    monkeypatch.setattr(cache, "_own_sources", lambda: "another version")
    read(folder)
    monkeypatch.setattr(cache.library, "capability", "another CPU")
    read(folder)
    provider = SimpleNamespace(op="quantize_int8", name="another")
    monkeypatch.setattr(cache, "chosen_providers", lambda device: [provider])
    read(folder)
    assert len(builds) == len(entries(root)) == 8
    (folder / "config.json").write_text(text)
    monkeypatch.undo()
    monkeypatch.setenv("INFINI_CACHE", str(root))
    for weights, dtype in (("dense", None), ("int8", None), ("dense", torch.float32)):
        assert_same(read(folder, weights, dtype), Llama._from_files(folder, weights, dtype, "cpu", None, False, None))
    assert len(entries(root)) == 8 and not warnings()


def spoil(entry: Path, how: str) -> None:
    size, data = entry.stat().st_size, entry.read_bytes()
    if how == "cut":
        os.truncate(entry, size // 2)
    elif how == "empty":
        os.truncate(entry, 0)
    elif how == "of zeros":
        entry.write_bytes(bytes(size))
    elif how == "longer":
        entry.write_bytes(data + b"x")
    else:
        place = {"magic": 1, "length": 8, "header": 200, "data": size - 5}[how]
        with open(entry, "r+b") as file:
            file.seek(place)
            file.write(bytes([data[place] ^ 4]))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut", r"got \d+ of \d+ bytes"),
        ("empty", "got 0 bytes"),
        ("of zeros", "got a header with another checksum"),
        ("longer", r"got \d+ of \d+ bytes"),
        ("magic", "got a header with another checksum"),
        ("length", "got a header with another checksum"),
        ("header", "got a header with another checksum"),
        ("data", "got data with another checksum"),
    ],
)
def test_damaged_entries(
    how: str, said: str, folder: Path, root: Path, builds: list[Llama], warnings: Callable[[], list[str]]
) -> None:
    """Also where the time of the last change is set to what it was."""
    built = read(folder)
    (entry,) = entries(root)
    before = entry.stat()
    spoil(entry, how)
    os.utime(entry, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert_same(read(folder), built)
    (warning,) = warnings()
    assert re.fullmatch(
        f"torch_infini.models.Llama: {entry} must be a whole entry of INFINI_CACHE, {said}: it is made anew", warning
    )
    assert_same(read(folder), built)
    assert len(builds) == 2 and not warnings()


def test_an_entry_under_the_name_of_another(folder: Path, root: Path, warnings: Callable[[], list[str]]) -> None:
    read(folder, "int8")
    (int8,) = entries(root)
    built = read(folder)
    (dense,) = {*entries(root)} - {int8}
    dense.write_bytes(int8.read_bytes())
    assert_same(read(folder), built)
    (warning,) = warnings()
    assert f"got that of {int8.name}" in warning


def test_damaged_notes(folder: Path, root: Path, builds: list[Llama], warnings: Callable[[], list[str]]) -> None:
    """Hashes are computed anew."""
    built = read(folder)
    for i, note in enumerate(sorted((root / "hashes").iterdir())):
        note.write_bytes([b"", b"{", b"[]", b"\xff\x00", b"null", note.read_bytes()[:40]][i % 6])
    assert_same(read(folder), built)
    assert len(builds) == 1 and not warnings()


def test_a_checkpoint_that_is_replaced(folder: Path, root: Path, builds: list[Llama]) -> None:
    """In place, by one of the same size and times; no name, size, inode or mtime differs."""
    first = read(folder)
    file = folder / "model.safetensors"
    before, data = file.stat(), file.read_bytes()
    random_model("llama", torch.bfloat16, seed=1).save_pretrained(folder.with_name("other"))
    other = folder.with_name("other") / file.name
    with open(file, "r+b") as written:
        written.write(other.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    for field in ("st_size", "st_mtime_ns", "st_ino"):
        assert getattr(before, field) == getattr(after, field)
    second = read(folder)
    assert len(builds) == 2 and not torch.equal(logits(first), logits(second))
    assert torch.equal(logits(second), logits(Llama._from_files(other.parent, "dense", None, "cpu", None, False, None)))
    file.write_bytes(data)  # the first one again: its entry is still there
    assert_same(read(folder), first)
    assert len(entries(root)) == 2


def test_a_checkpoint_that_changes_while_it_is_read(
    folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    original = Llama._from_files

    def changing(*arguments: Any) -> Llama:
        model = original(*arguments)
        os.utime(folder / "model.safetensors")
        return model

    monkeypatch.setattr(Llama, "_from_files", changing)
    read(folder)
    assert not entries(root)
    (warning,) = warnings()
    assert warning.endswith(f"got model.safetensors in {folder}, which changed while it was read: it is not")


def test_checkpoints_that_are_moved_or_copied(saved: Path, folder: Path, root: Path, builds: list[Llama]) -> None:
    assert_same(read(saved), read(folder))
    assert len(builds) == len(entries(root)) == 1


def test_data_is_checked_once(folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is hashed where no file has changed; an entry that was copied is."""
    built = read(folder)
    hashed: list[int] = []
    original = cache._hash
    monkeypatch.setattr(cache, "_hash", lambda file, *ends: hashed.append(1) or original(file, *ends))
    assert_same(read(folder), built)
    assert not hashed
    (entry,) = entries(root)
    entry.with_name("copy").write_bytes(entry.read_bytes())
    entry.with_name("copy").replace(entry)
    for _ in range(2):
        assert_same(read(folder), built)
    assert hashed == [1]


def test_bad_checkpoints_are_named_as_ever(folder: Path, root: Path, warnings: Callable[[], list[str]]) -> None:
    os.truncate(folder / "model.safetensors", 1000)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"model\.safetensors must be a whole safetensors file"):
            read(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="a model folder must hold safetensors files"):
        read(folder)
    assert not warnings() and not entries(root)


def test_what_cannot_be_stored(
    folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    """An attribute of a layer that JSON does not keep, of a format to come."""
    original = Llama._from_files

    def strange(*arguments: Any) -> Llama:
        model = original(*arguments)
        model.head.table = object()
        return model

    monkeypatch.setattr(Llama, "_from_files", strange)
    read(folder)
    (warning,) = warnings()
    assert "attributes must be numbers, strings, dtypes, or lists of them, got object: it is not" in warning
    assert not list((root / "models").iterdir())


# ---- folders that fail ----


@pytest.mark.parametrize("place", ["file", "below a file"])
def test_no_folder(
    place: str, folder: Path, tmp_path: Path, monkeypatch: Any, warnings: Callable[[], list[str]]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("INFINI_CACHE", str(tmp_path / "file" / ("x" if place == "below a file" else "")))
    expected = Llama._from_files(folder, "dense", None, "cpu", None, False, None)
    assert torch.equal(logits(read(folder)), logits(expected))
    (warning,) = warnings()
    assert re.fullmatch(
        r"torch_infini\.models\.Llama: the folder in INFINI_CACHE must be usable, got \[Errno .*\] .*: "
        "the model is read without it",
        warning,
    )


# root may write everywhere, but for this.
NO_PRIVILEGE = """
import ctypes
libc, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0)
sets = (ctypes.c_uint32 * 6)()
assert not libc.capget(header, sets)
sets[0] &= ~0b110  # effective: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
assert not libc.capset(header, sets)
"""
# No file may grow beyond this: writing fails as on a full disk.
FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
"""
KILLED = """
import os, signal
original = os.fsync
def killing(file):
    if os.fstat(file).st_size > 50_000:
        os.kill(os.getpid(), signal.SIGKILL)
    original(file)
os.fsync = killing
"""


def run(folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    return run_python(PROGRAM.format(before=before), folder)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's capabilities")
def test_a_folder_that_is_read_only(folder: Path, root: Path) -> None:
    """Without an entry the model is read as ever; with one and its notes it is mapped."""
    root.mkdir()
    root.chmod(0o500)
    first = run(folder, NO_PRIVILEGE)
    root.chmod(0o700)
    assert first.returncode == 0 and not list(root.iterdir())
    (line,) = first.stderr.splitlines()
    assert "the folder in INFINI_CACHE must be usable, got [Errno 13] Permission denied" in line
    second = run(folder)
    assert second.stderr == "" and second.stdout == first.stdout and len(entries(root)) == 1
    for place in (root, root / "hashes", root / "models"):
        place.chmod(0o500)
    third = run(folder, NO_PRIVILEGE + "Llama._from_files = exit")
    assert third.stderr == "" and third.stdout == first.stdout


def test_a_disk_that_is_full(folder: Path, root: Path) -> None:
    first = run(folder, FULL)
    (line,) = first.stderr.splitlines()
    assert "the model must be stored in INFINI_CACHE, got [Errno 27] File too large: it is not" in line
    assert not list((root / "models").iterdir())
    second = run(folder)
    assert second.stderr == "" and second.stdout == first.stdout and len(entries(root)) == 1


@pytest.mark.full
def test_a_process_that_is_killed(folder: Path, root: Path) -> None:
    """While it writes an entry: what it leaves is not used, and is removed by whoever writes this entry or another."""
    for weights in ("int8", "dense"):
        killed = run(folder, f"{KILLED}\nLlama.from_pretrained(sys.argv[1], {weights!r}, progress=False)")
        assert killed.returncode != 0 and killed.stdout == ""
    parts = list((root / "models").iterdir())
    assert len(parts) == 1 and parts[0].suffix == ".part" and parts[0].stat().st_size > 50_000
    os.truncate(parts[0], 10_000_000)  # whatever it left, nothing of it is in the entry
    done = run(folder)
    assert done.stderr == "" and entries(root)[0].stat().st_size < 1_000_000
    assert [file.suffix for file in (root / "models").iterdir()] == [".model"]
    assert run(folder, "Llama._from_files = exit").stdout == done.stdout


@pytest.mark.full
def test_processes_at_once(folder: Path, root: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(before=""), str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for _ in range(2):
        processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
        results = [process.communicate(timeout=120) for process in processes]
        assert len({output for output, _ in results}) == 1 and results[0][0]
        assert [error for _, error in results] == [""] * 3
        assert len(entries(root)) == 1 == len(list((root / "models").iterdir()))


def test_two_writers_of_one_entry(
    folder: Path, root: Path, builds: list[Llama], caplog: pytest.LogCaptureFixture
) -> None:
    """The second leaves it to the first."""
    caplog.set_level(logging.INFO, "torch_infini")
    read(folder)
    (entry,) = entries(root)
    entry.unlink()
    with cache._locked(entry.with_name(f"{entry.name}.part")) as file:
        assert file is not None
        model = read(folder)
        assert caplog.records[-1].getMessage() == f"torch_infini.models.Llama: another process writes {entry}"
        assert not entries(root)
    read(folder)
    assert_same(read(folder), model)
    assert len(builds) == 3


# ---- memory ----


def mapping_of(entry: Path) -> tuple[range, dict[str, int]]:
    """The addresses at which this process has a file, and how many kB of it are shared, private, dirty, ..."""
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    (found,) = [text for text in maps if str(entry) in text]
    first, end = (int(part, 16) for part in found.split()[0].split("-"))
    return range(first, end), {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB", found, re.M)}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_memory_is_that_of_the_file(folder: Path, root: Path) -> None:
    """All tensors are in it, aligned, and none of its pages is a copy after the model has run."""
    random_model("llama", torch.bfloat16, hidden_size=40).save_pretrained(folder)  # 80 bytes: no multiple of 64
    read(folder)
    (entry,) = entries(root)
    model = read(folder)
    logits(model)
    addresses, sizes = mapping_of(entry)
    for name, tensor in named_tensors(model):
        assert tensor.data_ptr() in addresses and tensor.data_ptr() % 64 == 0, name
        assert tensor.untyped_storage().nbytes() < entry.stat().st_size / 2
    assert sizes["Rss"] > 0
    assert sizes["Private_Dirty"] == sizes["Shared_Dirty"] == sizes["Anonymous"] == sizes["Swap"] == 0


def test_writing_to_a_weight(folder: Path, root: Path) -> None:
    """A program that does so has its own copy of the pages."""
    built = read(folder)
    model = read(folder)
    model.embed.weight.data.zero_()
    model.layers[0].mlp.down.load(torch.zeros(64, 96))
    assert not torch.equal(logits(model), logits(built))
    assert_same(read(folder), built)
