"""Imports inside torch_infini: which package may import which, no cycles, no private modules of another package.

Every import counts, inside functions and under TYPE_CHECKING too. docs and CONTRIBUTING.md describe the packages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "torch_infini"

# The rooms, lowest first, and what each may import: a room is a package of torch_infini, or one of its own modules.
BASE = {"_core"}
ALLOWED: dict[str, set[str]] = {
    "_core": set(),
    "ops": BASE,
    "runtime": BASE | {"ops"},
    "device": BASE | {"ops", "runtime"},
    "distributed": BASE,
    "weights": BASE | {"ops"},
    "nn": BASE | {"ops", "weights", "distributed"},
    "checkpoints": BASE | {"ops", "weights"},
    "models": BASE | {"ops", "weights", "distributed", "nn", "checkpoints"},
    "engine": BASE | {"ops", "weights", "distributed", "runtime", "nn", "models", "checkpoints", "patch"},
    "serve": BASE | {"ops", "distributed", "runtime", "nn", "models", "engine", PACKAGE},
    # What other projects' programs load; no part of the product stands on it.
    "integrations": BASE | {"ops", "weights", "nn", "checkpoints", "engine", "serve"},
    "patch": BASE | {"ops", "weights", "distributed", "checkpoints", "nn"},
    "compile": BASE | {"ops"},
    "demo": set(),
    # infinicore, infinilm, libinfiniop: no part of the product stands on them.
    "compat": BASE | {"checkpoints", "ops", "distributed", "runtime", "nn", "models", "engine", "serve"},
    "commands": BASE
    | {
        "ops",
        "weights",
        "runtime",
        "distributed",
        "engine",
        "serve",
        "patch",
        "demo",
    }
    | {"compat", "device", "integrations", PACKAGE},
    "__main__": {"commands"},
    # What proves the product, which the product never imports but for EXCEPTIONS.
    "testing": BASE | {"weights", "ops"},
    # The package itself.
    PACKAGE: BASE
    | {"ops", "runtime", "distributed", "nn", "models", "engine"}
    | {"weights", "checkpoints", "patch", "compile", "demo", "compat", "device"},
}
# (importing module, room): the reason. Imports inside functions and for type checkers only.
EXCEPTIONS = {
    (PACKAGE, "testing"): "an attribute of the package, loaded when it is asked for",
    ("commands.doctor", "testing"): "checks every op against its reference, loaded when the command runs",
    ("commands.ops", "testing"): "the dtypes that each op is proved with, loaded when the command runs",
    ("commands.tune", "testing"): "times as the benchmarks do, loaded when the command runs",
}
# (importing module, imported private module of another package).
PRIVATE = {
    ("checkpoints.blocks", "ops._blocks"),
    ("checkpoints.blocks", "ops._blocks.ggml"),
    ("checkpoints.formats.bitsandbytes", "ops._blocks"),
    ("checkpoints.formats.bitsandbytes", "ops._blocks.floats"),
    ("checkpoints.formats.fp8", "ops._blocks"),
    ("checkpoints.weight", "ops._blocks.int4"),
    ("checkpoints.formats.mxfp4", "ops._blocks"),
    ("checkpoints.formats.mxfp4", "ops._blocks.ggml"),
    ("checkpoints.formats.nvfp4", "ops._blocks"),
    ("checkpoints.formats.nvfp4", "ops._blocks.ggml"),
    ("nn.linear", "ops._packed"),
    ("patch.layers.packed_linear", "ops._packed"),
    ("patch.checks.conditions", "ops._registry"),
    ("patch.layers.sharded", "ops._registry"),
    ("testing.ops.embedding_blocks", "ops._blocks"),
    ("testing.ops.fused_experts", "ops._blocks"),
    ("testing.ops.fused_experts", "ops._panels"),
    *(
        (f"testing.ops.{op}", "ops._block_panels")
        for op in ("embedding_blocks", "fused_experts", "linear_block_panels", "pack_blocks", "unpack_blocks")
    ),
    ("testing.ops.linear_block_panels", "ops._blocks"),
    ("testing.ops.pack_blocks", "ops._blocks"),
    ("testing.ops.linear_blocks", "ops._blocks"),
    ("weights.blocks", "ops._blocks"),
    ("weights.blocks", "ops._block_panels"),
    ("testing.ops.linear_group8", "ops._panels"),
    ("testing.ops.linear_packed", "ops._packed"),
    ("testing.ops.linear_table4", "ops._panels"),
    ("testing.ops.pack_linear", "ops._packed"),
    ("testing.ops.quantize_group8", "ops._panels"),
    ("testing.ops.quantize_table4", "ops._panels"),
    ("weights._panels", "ops._panels"),
    ("weights.group8", "ops._panels"),
    ("weights.table4", "ops._panels"),
}
# The folders inside of a room, and which of each other they may import.
FOLDERS: dict[str, set[str]] = {
    "patch.checks": set(),
    "patch.layers": {"patch.checks"},
    "patch.files": {"patch.checks", "patch.layers"},
    "patch.paged": {"patch.checks", "patch.files", "patch.layers"},
}
# Cycles between modules of a package that are there today: the modules of each.
CYCLES = [
    {"ops._autograd", "ops._registry"},  # for a type
]


class Import(NamedTuple):
    """`name` is imported from `target` by `module`; both without "torch_infini."."""

    module: str
    target: str
    name: str
    line: int
    deferred: bool

    @property
    def rooms(self) -> tuple[str, str]:
        return self.module.partition(".")[0], self.target.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}, imports {self.target}" + (f" ({self.name})" if self.name else "")


def read_sources() -> dict[str, str]:
    """The source of every file of torch_infini, by its path in it; of a compiled module its stub, as if it were one."""
    stubs = [path for path in (ROOT / PACKAGE).rglob("*.pyi") if not path.with_suffix(".py").exists()]
    paths = [*(ROOT / PACKAGE).rglob("*.py"), *stubs]
    return {path.relative_to(ROOT / PACKAGE).with_suffix(".py").as_posix(): path.read_text() for path in paths}


def read_scripts() -> dict[str, str]:
    """The source of every file beside torch_infini and tests that imports it, by its path."""
    paths = [path for folder in ("benchmarks", ".ci") for path in (ROOT / folder).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def read_imports(sources: Mapping[str, str], scripts: Mapping[str, str] | None = None) -> list[Import]:
    """All imports of torch_infini's modules in these files; the package itself is called torch_infini.

    Scripts are files outside of the package, by their paths.
    """
    files = {}
    for file in sorted(sources):
        parts = (PACKAGE, *file.removesuffix(".py").split("/"))
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    short = lambda module: module.removeprefix(f"{PACKAGE}.")
    found = []
    texts = {**sources, **(scripts or {})}
    for module, file in {**files, **{path: path for path in scripts or ()}}.items():
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        for node in import_nodes(texts[file]):
            for target, name in targets_of(node.statement, package, files):
                if target.partition(".")[0] == PACKAGE and target != module:
                    line = node.statement.lineno
                    assert target in files, f"{file}, line {line}: there is no module {target}"
                    found.append(Import(short(module), short(target), name, line, node.deferred))
    return found


def targets_of(node: ast.Import | ast.ImportFrom, package: str, files: Mapping[str, str]) -> list[tuple[str, str]]:
    """(module, name in it) of everything that a statement imports."""
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names]
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    # What is imported from a package may be a module of it.
    names = [(f"{base}.{alias.name}", alias.name) for alias in node.names]
    return [(whole, "") if whole in files else (base, name) for whole, name in names]


class ImportNode(NamedTuple):
    statement: ast.Import | ast.ImportFrom
    deferred: bool


@cache
def import_nodes(source: str) -> list[ImportNode]:
    return [
        ImportNode(n, inside) for n, inside in nodes(ast.parse(source)) if isinstance(n, (ast.Import, ast.ImportFrom))
    ]


def nodes(tree: ast.AST, deferred: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for node in ast.iter_child_nodes(tree):
        yield node, deferred
        is_later = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        yield from nodes(node, deferred or is_later)


def cycles(arrows: Iterable[tuple[str, str]]) -> list[set[str]]:
    """The sets of two or more that reach one another, by what each reaches."""
    targets: dict[str, set[str]] = {}
    for start, end in arrows:
        targets.setdefault(start, set()).add(end)
    reached = {start: reachable(start, targets) for start in targets}
    found: list[set[str]] = []
    for start in sorted(targets):
        cycle = {end for end in reached[start] if start in reached.get(end, ())}
        if len(cycle) > 1 and cycle not in found:
            found.append(cycle)
    return found


def reachable(start: str, targets: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for end in targets.get(waiting.pop(), set()) - found:
            found.add(end)
            waiting.append(end)
    return found


def is_private(module: str) -> bool:
    """Whether the module is one that another package must not import: the modules of torch_infini itself are ours."""
    return any(part.startswith("_") for part in module.split(".")[1:])


def faults(sources: Mapping[str, str]) -> list[str]:
    """What breaks the rules in these files."""
    imports = read_imports(sources)
    outside = [i for i in imports if i.rooms[0] != i.rooms[1]]
    rooms = {i.rooms[0] for i in imports} | {i.rooms[1] for i in imports}
    wrong = [f"no rule for {room}" for room in sorted(rooms - ALLOWED.keys())]
    used = set()
    for i in outside:
        if i.rooms[1] in ALLOWED.get(i.rooms[0], ()):
            pass
        elif (i.module, i.rooms[1]) in EXCEPTIONS and i.deferred:
            used.add((i.module, i.rooms[1]))
        else:
            wrong.append(f"{i.rooms[0]} must not import {i.rooms[1]}: {i}")
    wrong += [f"exception that nothing needs: {pair}" for pair in sorted(EXCEPTIONS.keys() - used)]
    folder = lambda module: ".".join(module.split(".")[:2])
    wrong += [
        f"{folder(i.module)} must not import {folder(i.target)}: {i}"
        for i in imports
        if {folder(i.module), folder(i.target)} <= FOLDERS.keys() and folder(i.module) != folder(i.target)
        if folder(i.target) not in FOLDERS[folder(i.module)]
    ]
    private = {(i.module, i.target): i for i in outside if is_private(i.target)}
    private |= {(i.module, f"{i.target}.{i.name}"): i for i in outside if i.name[:1] == "_" and i.name[:2] != "__"}
    wrong += [f"private to another package: {i}" for pair, i in private.items() if pair not in PRIVATE]
    wrong += [f"private import that nothing needs: {pair}" for pair in sorted(PRIVATE - private.keys())]
    rooms_of = [i.rooms for i in outside if (i.module, i.rooms[1]) not in EXCEPTIONS]
    # torch_infini/__init__.py runs before any of its modules: what imports a name of it is no cycle, if it may.
    wrong += [f"packages in a cycle: {sorted(c)}" for c in cycles(r for r in rooms_of if PACKAGE not in r)]
    found = cycles((i.module, i.target) for i in imports if PACKAGE not in (i.module, i.target))
    wrong += [f"modules in a cycle: {sorted(cycle)}" for cycle in found if cycle not in CYCLES]
    wrong += [f"cycle that is there no more: {sorted(cycle)}" for cycle in CYCLES if cycle not in found]
    return wrong


def for_tests_alone(sources: Mapping[str, str], scripts: Mapping[str, str], pages: Iterable[str]) -> list[str]:
    """The modules of testing that neither the product nor a script nor a command on a page needs, directly or not.

    Those of testing.ops are all needed: OP_INFOS loads what lies there.
    """
    imports = read_imports(sources, scripts)
    # `from ..testing import moved` needs the module that moved is from, not all that the package hands on.
    handed_on = {i.name: i.target for i in imports if i.module == "testing"}
    arrows: dict[str, set[str]] = {"": set()}  # "" is all that is not of testing
    for i in imports:
        if i.module != "testing":
            start = i.module if i.rooms[0] == "testing" else ""
            arrows.setdefault(start, set()).add(handed_on.get(i.name, i.target) if i.target == "testing" else i.target)
    modules = {".".join(file.removesuffix(".py").removesuffix("/__init__").split("/")) for file in sources}
    arrows[""] |= {module for module in modules if module.startswith("testing.ops")}
    arrows[""] |= {name for page in pages for name in re.findall(r"python -m torch_infini\.(testing[.\w]*)", page)}
    of_testing = {module for module in modules if module.startswith("testing.")}
    return sorted(of_testing - reachable("", arrows))


def handed_to_tests_alone(sources: Mapping[str, str], scripts: Mapping[str, str]) -> list[str]:
    """The names of torch_infini.testing itself that nothing but tests imports, from there or from their module."""
    imports = read_imports(sources, scripts)
    handed_on = {i.name: i.target for i in imports if i.module == "testing"}
    used = {(i.target, i.name) for i in imports if i.module != "testing"}
    return sorted(name for name, of in handed_on.items() if not {("testing", name), (of, name)} & used)


def test_testing_has_nothing_for_tests_alone() -> None:
    """That is in tests/support, so that it is no part of what is installed."""
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    assert for_tests_alone(read_sources(), read_scripts(), pages) == []
    assert handed_to_tests_alone(read_sources(), read_scripts()) == []


def test_what_is_for_tests_alone_is_found() -> None:
    sources = read_sources()
    sources["testing/soak.py"] = "from .engines import finish"
    sources["testing/engines.py"] = "from . import moved"
    sources["testing/__init__.py"] += "\nfrom .engines import small_engine\n"

    def found(script: str = "", page: str = "") -> set[str]:
        return {"testing.soak", "testing.engines"} & {*for_tests_alone(sources, {"benchmarks/x.py": script}, [page])}

    assert found() == {"testing.soak", "testing.engines"}
    assert found("def f():\n    from torch_infini.testing import small_engine") == {"testing.soak"}
    assert found("from torch_infini.testing import moved") == {"testing.soak", "testing.engines"}
    assert found("import torch_infini.testing.soak") == set()
    assert found(page="`python -m torch_infini.testing.soak 5`") == set()
    assert handed_to_tests_alone(sources, read_scripts()) == ["small_engine"]


def test_arrows() -> None:
    assert faults(read_sources()) == []


def test_allowed_arrows_have_no_cycle() -> None:
    arrows = [(room, other) for room, others in ALLOWED.items() for other in others if PACKAGE not in (room, other)]
    assert cycles(arrows) == []


@pytest.mark.parametrize(
    "file, line, fault",
    [
        ("nn/norm.py", "from ..engine import LLM", "nn must not import engine"),
        ("distributed/groups.py", "from ..nn import Linear", "packages in a cycle: ['distributed', 'nn']"),
        ("ops/rope.py", "def f():\n    import torch_infini.nn.cache", "ops must not import nn"),
        ("patch/layers/linear.py", "from ... import compile", "patch must not import compile"),
        ("patch/checks/trial.py", "from ..layers import norm", "patch.checks must not import patch.layers"),
        ("patch/layers/norm.py", "from ..files.save import save", "patch.layers must not import patch.files"),
        ("engine/runner.py", "def f():\n    from ..testing import moved", "engine must not import testing"),
        ("commands/doctor.py", "from ..testing import moved", "commands must not import testing"),
        ("models/llama.py", "from ..ops._registry import FLOATS", "private to another package: models.llama"),
        ("models/llama.py", "from ..nn.linear import _x", "private to another package: models.llama"),
        ("engine/blocks.py", "from .scheduler import Scheduler", "modules in a cycle: ['engine.blocks', "),
        (
            "engine/outputs.py",
            "if TYPE_CHECKING:\n    from .sequence import Request",
            "modules in a cycle: ['engine.outputs', 'engine.sampler', 'engine.sampling_params', 'engine.sequence', "
            "'engine.text']",
        ),
        ("utils.py", "from . import ops", "no rule for utils"),
        ("models/cache.py", "def f():\n    from ..compat import infinicore", "models must not import compat"),
        ("runtime/streams.py", "from ..compat.infinicore import Tensor", "runtime must not import compat"),
    ],
)
def test_broken_arrows_are_found(file: str, line: str, fault: str) -> None:
    sources = read_sources()
    found = faults({**sources, file: f"{sources.get(file, '')}\n\n{line}\n"})
    assert any(fault in one for one in found), found
