"""The API reference: a page of Markdown for each public package, from its public names and their docstrings.

site.py adds the pages to the site; tests/test_site.py holds that every public name is on one.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The packages that programs import, in the order of the reference. Their public names are in __all__.
PACKAGES = (
    "torch_infini",
    "torch_infini.ops",
    "torch_infini.patch",
    "torch_infini.compile",
    "torch_infini.engine",
    "torch_infini.serve",
    "torch_infini.models",
    "torch_infini.nn",
    "torch_infini.weights",
    "torch_infini.checkpoints",
    "torch_infini.distributed",
    "torch_infini.device",
    "torch_infini.runtime",
    "torch_infini.testing",
    "torch_infini.demo",
)
# Those that import another library: read, not imported.
INTEGRATIONS = ("lm_eval", "ray", "torchao", "vllm")
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Note|Source|Equivalent to|Examples?):\s*(.*)")
ITEM = re.compile(r"(\*{0,2}\w[\w.]*(?:, \*{0,2}\w[\w.]*)*): (.*)")
LONGEST = 100  # characters of a signature in a line


def public_names(package: str) -> list[str]:
    """A package's public names, in order."""
    return sorted(importlib.import_module(package).__all__, key=lambda name: (name.lower(), name))


def escaped(text: str) -> str:
    """Text that Markdown shows as it is; code between backquotes stays code."""
    parts = re.split(r"(`[^`]+`)", text)
    marks = re.compile(r"[\\*\[\]<>{}#|~`]|(?<!\w)_|_(?!\w)")
    return "".join(part if i % 2 else marks.sub(r"\\\g<0>", part) for i, part in enumerate(parts))


def paragraphs(lines: list[str]) -> Iterator[list[str]]:
    """Lines between empty ones."""
    current: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            current.append(line)
        elif current:
            yield current
            current = []


def prose(lines: list[str]) -> Iterator[str]:
    """Paragraphs of a docstring as Markdown: text, lists and code that begins with >>>."""
    for one in paragraphs(lines):
        first = one[0].lstrip()
        if first.startswith(">>> ") or one[0].startswith("    "):
            indent = min(len(line) - len(line.lstrip()) for line in one)
            yield "\n".join(
                [f"```{'pycon' if first.startswith('>>> ') else ''}", *(line[indent:] for line in one), "```"]
            )
        elif re.match(r"[*-] ", first):
            items: list[str] = []
            for line in one:
                if re.match(r"[*-] ", line.lstrip()) or not items:
                    items.append(line.strip()[2:])
                else:
                    items[-1] += f" {line.strip()}"
            yield "\n".join(f"* {escaped(item)}" for item in items)
        else:
            yield "\n".join(escaped(line.strip()) for line in one)
        yield ""


def items(lines: list[str]) -> Iterator[str]:
    """The arguments, attributes or errors of a docstring's section as a list."""
    found: list[str] = []
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    for line in filter(str.strip, lines):
        match = ITEM.match(line.strip())
        if match and len(line) - len(line.lstrip()) == indent:
            found.append(f"* `{match[1]}`: {escaped(match[2])}")
        elif found:
            found[-1] += f" {escaped(line.strip())}"
        else:
            found.append(escaped(line.strip()))
    yield from (*found, "")


def markdown(doc: str) -> Iterator[str]:
    """A docstring with sections (Args, Returns, Raises ...) as Markdown."""
    section, body = "", list[str]()

    def close() -> Iterator[str]:
        if section:
            yield from (f"**{section}**", "")
        listed = section in ("Args", "Attributes", "Raises")
        yield from items(body) if listed else prose(inspect.cleandoc("\n".join(["", *body])).splitlines())

    for line in doc.splitlines():
        match = SECTION.fullmatch(line)
        if match and not line.startswith(" "):
            yield from close()
            section, body = match[1], [match[2]] if match[2] else []
        else:
            body.append(line)
    yield from close()


class Shown:
    """What stands for a function that is an argument's default."""

    def __init__(self, function: Any) -> None:
        self.name = "..." if "<" in function.__qualname__ else function.__name__

    def __repr__(self) -> str:
        return self.name


def signature(name: str, what: Any) -> str:
    """How a function or a class is called, in lines that are not too long; "" where Python cannot say."""
    try:
        found = inspect.signature(what)
    except (TypeError, ValueError):
        return ""
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name not in ("self", "cls")]
    parts = []
    keywords = False
    for parameter in plain:
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            if not any(one.kind is one.VAR_POSITIONAL for one in plain):
                parts.append("*")
        keywords |= parameter.kind is parameter.VAR_POSITIONAL
        if inspect.isroutine(parameter.default):
            parameter = parameter.replace(default=Shown(parameter.default))
        parts.append(re.sub(r"<(?:class )?'?([\w.]+)[^>]*>", r"\1", str(parameter)))
    line = f"{name}({', '.join(parts)})"
    return line if len(line) <= LONGEST else f"{name}(\n    " + ",\n    ".join(parts) + ",\n)"


def own_docstring(what: Any) -> str:
    """What an object says of itself: not what its type says of all such objects."""
    doc = getattr(what, "__doc__", None)
    described = callable(what) or isinstance(what, (ModuleType, property))
    plain = described and doc and (inspect.isroutine(what) or doc != type(what).__doc__)
    # A dataclass without a docstring has its signature as one.
    return inspect.cleandoc(doc) if plain and not re.match(r"\w+\([^\n]*\)$", doc or "") else ""


def value_of(what: Any) -> str:
    """A constant in a line: a path as its name, a large table as what it holds."""
    if isinstance(what, (set, frozenset)):
        return f"{{{', '.join(sorted(map(repr, what)))}}}"
    if isinstance(what, str) and Path(what).is_absolute():
        return f"<the folder {Path(what).parent.name}/{Path(what).name}>"
    if isinstance(what, dict):
        return f"{{{', '.join(repr(key) + ': ...' for key in what)}}}"
    return re.sub(r"typing\.|<function ([\w.]+) at 0x[0-9a-f]+>", r"\1", repr(what))


def members(what: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class, or a base of ours, defines and documents."""
    seen: set[str] = set()
    for base in what.__mro__:
        if base.__module__.startswith("torch_infini"):
            for name, value in vars(base).items():
                inner = getattr(value, "__func__", value)
                is_member = inspect.isfunction(inner) or isinstance(inner, property)
                if is_member and not name.startswith("_") and name not in seen and own_docstring(inner):
                    seen.add(name)
                    yield name, inner


def entry(name: str, what: Any, schema: str = "") -> Iterator[str]:
    """A public name with its signature and its docstring."""
    yield from (f"## {name}", "")
    if isinstance(what, ModuleType):
        package = what.__name__
        yield escaped((inspect.getdoc(what) or "").split("\n\n")[0])
        yield from ("", f"[{package}]({file_of(package)}.md)" if package in PACKAGES else f"`import {package}`", "")
        return
    call = signature(name, what) if callable(what) and hasattr(what, "__module__") else ""
    if call and not (isinstance(what, type) and issubclass(what, BaseException)):
        yield from ("```python", f"{'class ' if isinstance(what, type) else ''}{call}", "```", "")
    if schema:
        yield from ("```", schema, "```", "")
    doc = own_docstring(what)
    if doc:
        yield from markdown(doc)
    else:
        yield from ("```python", f"{name} = {value_of(what)}", "```", "")
    if isinstance(what, type):
        for member, value in members(what):
            yield from (f"### {name}.{member}", "")
            if not isinstance(value, property):
                yield from ("```python", signature(member, value), "```", "")
            yield from markdown(own_docstring(value))


def file_of(package: str) -> str:
    """The name of a package's page, without .md."""
    return package.removeprefix("torch_infini").lstrip(".") or "torch_infini"


def page(package: str) -> str:
    """The page of a package."""
    module = importlib.import_module(package)
    schemas = {}
    if package == "torch_infini.ops":
        schemas = {spec.name: f"torch.ops.infini.{spec.name}{spec.schema}" for spec in module.all_ops()}
    lines = [f"# {package}", "", *markdown(inspect.getdoc(module) or "")]
    for name in public_names(package):
        lines += entry(name, getattr(module, name), schemas.get(name, ""))
    return "\n".join(lines).rstrip() + "\n"


def integrations_page() -> str:
    """The page of the integrations, of which nothing is imported: each needs another library."""
    lines = ["# torch_infini.integrations", ""]
    for name in INTEGRATIONS:
        folder = ROOT / "torch_infini" / "integrations"
        file = folder / f"{name}.py" if (folder / f"{name}.py").is_file() else folder / name / "__init__.py"
        tree = ast.parse(file.read_text(encoding="utf-8"))
        lines += [f"## {name}", "", *markdown(ast.get_docstring(tree) or "")]
    return "\n".join(lines).rstrip() + "\n"


def index() -> str:
    """The first page of the reference."""
    lines = [
        "# API reference",
        "",
        "Every public name, from its docstring; `help(torch_infini.ops.rope)` has the same.",
        "",
    ]
    lines += ["| package | what it is |", "| --- | --- |"]
    for package in PACKAGES:
        doc = inspect.getdoc(importlib.import_module(package)) or ""
        first = " ".join(doc.split("\n\n")[0].split())
        lines.append(f"| [{package}]({file_of(package)}.md) | {escaped(first)} |")
    lines.append("| [torch_infini.integrations](integrations.md) | Other libraries that compute with these kernels. |")
    names = [*map(file_of, PACKAGES), "integrations"]
    return "\n".join([*lines, "", "```{toctree}", ":hidden:", "", *names, "```"]) + "\n"


def pages() -> dict[str, str]:
    """The reference: text by name of the page."""
    return {
        "index": index(),
        **{file_of(package): page(package) for package in PACKAGES},
        "integrations": integrations_page(),
    }
