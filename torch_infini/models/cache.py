"""Loaded models in the folder INFINI_CACHE: written at the first start, mapped at later ones and shared by processes.

An entry is a JSON header and the memory of all tensors; its name is a hash of everything that the tensors depend on.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, TypeVar

import torch
from torch import nn

from .._core import library
from ..checkpoints import files_of
from ..ops import chosen_providers
from . import checkpoint
from .config import LlamaConfig
from .module_state import config_of, describe, restore

_NAME = "torch_infini.models.Llama"
_MAGIC = b"infini\x00\x01"
_PRELUDE = struct.Struct("<8sQ32s")  # magic, the header's size and sha256
_PIECE = 8 << 20  # bytes that a thread hashes at a time
# Resolution of time stamps in seconds: the tick of a kernel, or that of old file systems.
_TICK, _COARSE = 0.02, 2.0

log = logging.getLogger("torch_infini")
Model = TypeVar("Model", bound=nn.Module)
Identity = list[int]  # changes when the file's contents do: no program can set ctime


class _DamagedEntry(Exception):
    """An entry that cannot be used; the message says what it has."""


def load(
    path: Path,
    settings: Mapping[str, object],
    device: torch.device | str,
    build: Callable[[], Model],
    skeleton: Callable[[LlamaConfig, torch.dtype], Model],
) -> Model:
    """Return build(), or the same model from the folder INFINI_CACHE, where a result of build() is stored.

    If the cache cannot be used or the entry is damaged, log a warning and build the model.

    Args:
        path: The model's folder or GGUF file.
        settings: What the model depends on besides the files, this library and the CPU.
        device: Where the model goes. Only models on the CPU are stored.
        build: Reads the model.
        skeleton: Makes a model without memory.
    """
    root = os.environ.get("INFINI_CACHE")
    if not root or torch.device(device).type != "cpu":
        return build()
    start = time.perf_counter()
    try:
        files = _files(path)
    except (OSError, ValueError):
        return build()  # reports the error
    try:
        hashes = _Hashes(Path(os.path.expanduser(root), "hashes"))
        entries = hashes.folder.with_name("models")
        for folder in (hashes.folder, entries):
            folder.mkdir(parents=True, exist_ok=True)
        sources = {os.path.relpath(file, path): hashes.of(file) for file in files}
        entry = entries / f"{_key(hashes, settings, sources)}.model"
        stored = _read(entry, hashes, skeleton)
    except _DamagedEntry as damage:
        log.warning("%s: %s must be a whole entry of INFINI_CACHE, got %s: it is made anew", _NAME, entry, damage)
        with suppress(OSError):
            entry.unlink()
        stored = None
    except OSError as error:
        log.warning("%s: the folder in INFINI_CACHE must be usable, got %s: the model is read without it", _NAME, error)
        return build()
    if stored is not None:
        log.info("%s: %s from the cache, %s, in %.3f s", _NAME, path, entry, time.perf_counter() - start)
        return stored
    model = build()
    try:
        for name, (_, identity) in sources.items():
            if _identity(os.stat(path / name)) != identity:
                raise OSError(f"{name} in {path}, which changed while it was read")
        _write(entry, model, hashes)
    except (OSError, TypeError) as error:
        log.warning("%s: the model must be stored in INFINI_CACHE, got %s: it is not", _NAME, error)
    return model


def _files(path: Path) -> list[Path]:
    """Return the files that a model is read from: itself, or a folder's JSON and tensor files."""
    return [path] if path.is_file() else sorted({*filter(Path.is_file, path.glob("*.json")), *files_of(path)})


def _key(hashes: _Hashes, settings: Mapping[str, object], sources: Mapping[str, tuple[str, Identity]]) -> str:
    """Hash everything that the bits of a model depend on."""
    facts = {
        **settings,
        "files": {name: digest for name, (digest, _) in sources.items()},
        "sources": _own_sources(),
        "libraries": {file.name: hashes.of(file)[0] for file in sorted(library.PATH.parent.glob("*.so"))},
        "providers": [(provider.op, provider.name) for provider in chosen_providers("cpu")],
        "kernels": [library.capability, library.cpu_tiles()],
        "torch": [torch.__version__, torch.backends.cpu.get_cpu_capability()],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@cache
def _own_sources() -> str:
    """Hash this package's sources, 2 MB, because a version number would have to be raised by hand."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(entry: Path, hashes: _Hashes, skeleton: Callable[[LlamaConfig, torch.dtype], Model]) -> Model | None:
    """Map an entry; None if there is none. The header is always checked, the data once for each state of the file."""
    try:
        file = open(entry, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return None
    with file:
        size = os.fstat(file.fileno()).st_size
        if size < _PRELUDE.size:
            raise _DamagedEntry(f"{size} bytes")
        magic, length, digest = _PRELUDE.unpack(file.read(_PRELUDE.size))
        written = file.read(length) if magic == _MAGIC and length < size else b""
        if hashlib.sha256(written).digest() != digest:
            raise _DamagedEntry("a header with another checksum")
        header = json.loads(written)
        if header.get("entry") != entry.name:
            raise _DamagedEntry(f"that of {header.get('entry')}")
        if header["end"] != size:
            raise _DamagedEntry(f"{size} of {header['end']} bytes")
        if hashes.of(entry, header["begin"], file)[0] != header["data"]:
            raise _DamagedEntry("data with another checksum")
        # Copy on write: all processes share the file's pages, and one that writes to a weight gets pages of its own.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_WILLNEED"):
        memory.madvise(mmap.MADV_WILLNEED)
    model = skeleton(*config_of(header["model"]))
    restore(model, header["model"], memory, header["begin"])
    return model


def _write(entry: Path, model: nn.Module, hashes: _Hashes) -> None:
    """Write an entry, unless another process is writing it."""
    _remove_parts(entry)
    description, spans = describe(model)
    header = {"entry": entry.name, "model": description, "data": "0" * 64, "begin": 0, "end": 0}
    begin = -(-(_PRELUDE.size + len(json.dumps(header)) + 64) // mmap.PAGESIZE) * mmap.PAGESIZE
    with _replacing(entry, new=True) as file:
        if file is None:
            log.info("%s: another process writes %s", _NAME, entry)
            return
        for span in spans:
            file.seek(begin + span.begin)
            file.write(memoryview((ctypes.c_char * span.size).from_address(span.address)).cast("B"))
        file.flush()
        end = os.fstat(file.fileno()).st_size
        digest = _hash(file, begin, end)
        header |= {"data": digest, "begin": begin, "end": end}
        written = json.dumps(header).encode()
        file.seek(0)
        file.write(_PRELUDE.pack(_MAGIC, len(written), hashlib.sha256(written).digest()) + written)
        kept = os.dup(file.fileno())  # another process may replace the file as soon as it has its name
    try:
        hashes.note(entry, begin, digest, _identity(os.fstat(kept)))
    finally:
        os.close(kept)


class _Hashes:
    """Hashes of files, each computed once per state of its file and stored in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, path: Path, begin: int = 0, file: BinaryIO | None = None) -> tuple[str, Identity]:
        """Return the hash of a file's bytes from `begin` on, and the file's identity at that time.

        Raises:
            OSError: If the file cannot be read or changes meanwhile, or its hash cannot be stored.
        """
        if file is None:
            with open(path, "rb") as file:
                return self.of(path, begin, file)
        status = os.fstat(file.fileno())
        identity = _identity(status)
        with suppress(OSError, ValueError):
            found = json.loads(self._place(path).read_bytes())
            if isinstance(found, list) and found[:-1] == [begin, identity]:
                return found[-1], identity
        # A change writes its first bytes after setting the time stamp, and within a tick all stamps are equal.
        _wait_for_next_tick(status)
        with _replacing(self._place(path)) as note:  # first, because the folder may not be writable
            digest = _hash(file, begin, status.st_size)
            if _identity(os.fstat(file.fileno())) != identity:
                raise OSError(f"{path}, which changed while it was read")
            if note is not None:
                note.write(json.dumps([begin, identity, digest]).encode())
        return digest, identity

    def note(self, path: Path, begin: int, digest: str, identity: Identity) -> None:
        """Store a known hash."""
        _wait_for_next_tick(os.stat(path))
        with _replacing(self._place(path)) as note:
            if note is not None:
                note.write(json.dumps([begin, identity, digest]).encode())

    def _place(self, path: Path) -> Path:
        return self.folder / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}.json"


def _identity(status: os.stat_result) -> Identity:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def _wait_for_next_tick(status: os.stat_result) -> None:
    """Wait until a change of the file would get another time stamp, for files that were just written."""
    longest = _COARSE if status.st_ctime_ns % 1_000_000_000 == 0 else _TICK
    time.sleep(min(max(status.st_ctime + longest - time.time(), 0), longest))


def _hash(file: BinaryIO, begin: int, end: int) -> str:
    """Return the hash of the hashes of a file's pieces, which threads compute."""

    def piece(first: int) -> bytes:
        return hashlib.sha256(os.pread(file.fileno(), min(_PIECE, end - first), first)).digest()

    with ThreadPoolExecutor(checkpoint._readers(), "torch_infini hashes") as pool:
        return hashlib.sha256(b"".join(pool.map(piece, range(begin, end, _PIECE)))).hexdigest()


@contextmanager
def _replacing(path: Path, new: bool = False) -> Iterator[BinaryIO | None]:
    """Write a file that gets its name only when all of it is on disk.

    Yields:
        The file; None if another process is writing it, or if it exists and must be `new`.
    """
    part = path.with_name(f"{path.name}.part")
    with _locked(part) as file:
        if file is None:
            yield None
            return
        if new and path.exists():
            part.unlink()
            yield None
            return
        try:
            file.truncate(0)  # a killed process may have written to it
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO | None]:
    """Open or create a file and lock it for this process; None if another process has the lock."""
    while True:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            try:
                is_there = os.path.samestat(os.stat(path), os.fstat(file.fileno()))
            except FileNotFoundError:
                is_there = False
            if is_there:  # its last owner has not renamed or removed it meanwhile
                yield file
                return


def _remove_parts(entry: Path) -> None:
    """Remove partial files of other entries that killed processes left."""
    for part in entry.parent.glob("*.part"):
        if part.name != f"{entry.name}.part":
            with suppress(OSError), _locked(part) as file:
                if file is not None:
                    part.unlink()
