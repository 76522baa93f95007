"""Keeps the public interface in tests/interface.txt, so that no change of it goes unseen into a release.

    python .ci/interface.py --check     # exit status 1 where something of the record was removed or changed
    python .ci/interface.py --write     # records what there is now

The interface is: the public names of the Python packages with their arguments and defaults (those of .ci/api.py), the
schemas of the ops, the declarations of the C headers, and the sonames of the C libraries. What is new needs no record
to pass. The first line of the record is the version that it was written for. As long as CHANGELOG.md calls that version
unreleased, --write records any change. After that, one that removes or changes something needs a new version first:
another minor version before 1.0, another major version from then on.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "interface.txt"
HEADERS = ROOT / "csrc" / "include"
LIBRARIES = ("libinfinirt", "libinfiniop", "libinfiniccl")
LEFT_OUT = {"torch_infini.compat"}  # a build may lack it; InfiniCore and InfiniLM say what is in it


def beside(name: str) -> Any:
    """A module of this folder, or the package of this checkout."""
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    try:
        return importlib.import_module(name)
    finally:
        del sys.path[:2]


def python_lines() -> Iterator[str]:
    """A line for each public name of the Python packages, and for each member of a public class."""
    api = beside("api")
    for package in api.PACKAGES:
        module = beside(package)
        for name in sorted(set(module.__all__)):
            what, whole = getattr(module, name), f"{package}.{name}"
            if whole in LEFT_OUT:
                continue
            if inspect.ismodule(what):
                yield f"python {whole} (module)"
            elif isinstance(what, type) and issubclass(what, enum.Enum):
                yield f"python {whole}: {', '.join(f'{one.name}={one.value!r}' for one in what)}"
            elif isinstance(what, type) and issubclass(what, BaseException):
                yield f"python {whole} (error)"
            elif callable(what) and hasattr(what, "__name__"):
                yield f"python {one_line(api.signature(whole, what)) or whole}"
            else:
                yield f"python {whole} (value)"
            if isinstance(what, type):
                for member, value in api.members(what):
                    is_property = isinstance(value, property)
                    called = f"{whole}.{member}" if is_property else one_line(api.signature(f"{whole}.{member}", value))
                    yield f"python {called}"


def op_lines() -> Iterator[str]:
    """A line for each op: its schema."""
    for spec in beside("torch_infini.ops").all_ops():
        yield f"op infini::{spec.name}{spec.schema}"


def one_line(text: str) -> str:
    """Text with single spaces, without the comma that ends a list in lines."""
    return re.sub(r",\)$", ")", re.sub(r"\(\s+", "(", re.sub(r"\s+", " ", text))).strip().replace(", )", ")")


def declarations(text: str) -> Iterator[str]:
    """What a C header declares, each in a line: functions, types and constants."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
    text = re.sub(r"^#ifdef __cplusplus\n.*?^#endif", "", text, flags=re.S | re.M)
    text = re.sub(r"^[^\S\n]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.M)
    depth, begin = 0, 0
    for i, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if letter == ";" and depth == 0:
            yield one_line(re.sub(r"\b(INFINI_API|INFINI_ENUM_BASE)\b", "", text[begin:i]))
            begin = i + 1


def c_lines() -> Iterator[str]:
    """A line for each declaration of the C headers, those of C++ (.hpp) left out, which promise no ABI."""
    for header in sorted(HEADERS.rglob("*.h")):
        for line in declarations(header.read_text(encoding="utf-8")):
            yield f"c {header.relative_to(HEADERS).as_posix()}: {line}"


def soname_lines(folder: Path) -> Iterator[str]:
    """A line for each C library: the name by which programs ask the loader for it."""
    for library in LIBRARIES:
        file = folder / f"{library}.so"
        said = subprocess.run(["readelf", "-d", str(file)], capture_output=True, text=True, check=True).stdout
        found = re.search(r"soname: \[(.+?)\]", said)
        yield f"soname {library}: {found[1] if found else 'none'}"


def interface() -> list[str]:
    """The lines of the record, without the first."""
    lines = [*python_lines(), *op_lines(), *c_lines(), *soname_lines(ROOT / "torch_infini" / "lib")]
    return sorted(set(lines))


def version() -> str:
    """The version of this checkout."""
    return str(beside("torch_infini").__version__)


def is_released(version: str) -> bool:
    """Whether CHANGELOG.md has this version without "(unreleased)"."""
    heading = re.search(rf"^## {re.escape(version)}\b(.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    return heading is not None and "unreleased" not in heading[1]


def breaks(old: str, new: str) -> bool:
    """Whether the step from a version to another allows to remove and to change."""
    before, after = ([int(part) for part in one.split(".")[:2]] for one in (old, new))
    return after[0] > before[0] or (before[0] == after[0] == 0 and after[1] > before[1])


def gone(recorded: Sequence[str], now: Sequence[str]) -> list[str]:
    """What was removed, or changed so that programs must change too, and what stands in its place."""
    there = set(now)
    before = set(recorded)
    names = {name_of(line): line for line in now if line not in before}
    pairs = [(line, names.get(name_of(line), "removed")) for line in recorded if line not in there]
    return [f"{old}\n    now: {new}" for old, new in pairs if not takes_all_of(new, old)]


def split(text: str) -> list[str]:
    """The parts between commas that stand in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}") if not quote else 0
        if letter in "'\"":
            quote = "" if quote == letter else quote or letter
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def takes_all_of(new: str, old: str) -> bool:
    """Whether programs for an older form of a function or an enumeration fit a newer form.

    They do if all arguments are where they were, with their defaults, and those that were added have defaults too. An
    enumeration may get more constants.
    """
    if " enum " in old:
        before, after = (line.partition("{")[2].rpartition("}")[0] for line in (old, new))
        return " enum " in new and set(split(before)) <= set(split(after))
    forms = [re.fullmatch(r"([^(]*)\((.*)\)(.*)", line) for line in (old, new)]
    if not old.startswith(("python", "op")) or not all(forms):
        return False
    (name, before, end), (new_name, after, new_end) = (form.groups() for form in forms if form)
    arguments, more = split(before), split(after)
    at = next((i for i, one in enumerate(arguments) if one.startswith("*")), len(arguments))
    added = [one for one in more if one not in arguments]
    return (
        (name, end) == (new_name, new_end)
        and arguments[:at] == more[:at]
        and set(arguments) <= set(more)
        and all("=" in one or one.startswith("*") for one in added)
    )


def name_of(line: str) -> str:
    """What a line is about: equal for an older and a newer form of one name."""
    kind, _, rest = line.partition(" ")
    if kind == "c":
        header, _, declared = rest.partition(": ")
        pattern = r"\(\*(\w+)\)|(\w+)$" if declared.startswith("typedef") else r"(\w+) ?\(|(\w+)$"
        found = re.search(pattern, declared)
        return f"c {header} {next(filter(None, found.groups())) if found else declared}"
    return f"{kind} {re.split(r'[(: ]', rest.replace('::', '.'))[0]}"


def read_record(path: Path) -> tuple[str, list[str]]:
    """The version of the record, and its lines."""
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    return first.removeprefix("version "), lines


def check(recorded: tuple[str, list[str]], now: list[str], current: str, released: bool) -> str:
    """What is wrong, in words; "" if nothing is.

    Args:
        recorded: The version of the record, and its lines.
        now: The lines of the interface as it is.
        current: The version of this checkout.
        released: Whether the record's version has been released.
    """
    old, lines = recorded
    missing = gone(lines, now)
    if not missing:
        return ""
    what = "\n  ".join(missing)
    if not released:
        rule = f"{old} is not released: if that is meant, `python .ci/interface.py --write` records it"
    elif breaks(old, current):
        rule = f"the new version {current} allows it: `python .ci/interface.py --write` records it"
    else:
        rule = f"it needs a new {'minor' if old.startswith('0.') else 'major'} version, got {current} (CONTRIBUTING.md)"
    return f"removed or changed since the record of {old}:\n  {what}\n{rule}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--check", action="store_true", help="exit status 1 where something was removed or changed")
    way.add_argument("--write", action="store_true", help="write the record")
    options = parser.parse_args(arguments)
    now, current = interface(), version()
    recorded = read_record(RECORD) if RECORD.is_file() else (current, [])
    released = is_released(recorded[0])
    wrong = check(recorded, now, current, released)
    if wrong and (options.check or (released and not breaks(recorded[0], current))):
        print(f"interface: {wrong}")
        return 1
    if options.write:
        RECORD.write_text("\n".join([f"version {current}", *now]) + "\n", encoding="utf-8")
        print(f"interface: {RECORD.relative_to(ROOT)}: {len(now)} lines of version {current}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
