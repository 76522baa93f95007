"""What the files and docstrings promise: every source says what it is for, every example does what its op does."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import torch_infini
from torch_infini.testing import as_tuple, assert_close, call, copied
from torch_infini.testing.ops import OpInfo, Sample, all_op_infos

ROOT = Path(__file__).resolve().parent.parent


def sources(*suffixes: str) -> list[Path]:
    """The project's own files."""
    folders = ("csrc", "torch_infini", "tests", "benchmarks")
    found = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return sorted(p for p in [*found, *ROOT.glob("*.py")] if p.suffix in suffixes)


@pytest.mark.parametrize("path", sources(".py"), ids=lambda p: str(p.relative_to(ROOT)))
def test_python_files_say_what_they_are_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the file does not open with a docstring"


@pytest.mark.parametrize("path", sources(".h", ".cpp", ".cu", ".cuh", ".hpp"), ids=lambda p: str(p.relative_to(ROOT)))
def test_native_files_say_what_they_are_for(path: Path) -> None:
    assert path.read_text().startswith(("// ", "/* ")), "the file does not open with a comment"


def example_of(spec: OpInfo) -> str:
    """The code under "Equivalent to:" in the op's docstring."""
    doc = inspect.getdoc(spec.function) or ""
    lines = doc.split("Equivalent to:")[1].split("Source:")[0].splitlines()
    code = [line.strip()[4:] for line in lines if line.strip().startswith((">>> ", "... "))]
    return textwrap.dedent("\n".join(code))


@pytest.mark.parametrize("spec", [s for s in all_op_infos() if s.compare is None], ids=lambda s: s.name)
def test_examples(spec: OpInfo) -> None:
    """The example's last assignment gives what the op gives, for a call with default attributes.

    Of an op that writes into its arguments: the example writes the same into them.
    """
    code = example_of(spec)
    last = ast.parse(code).body[-1]
    assert spec.mutates or isinstance(last, ast.Assign), "the example must end in an assignment of the result"
    dtype = spec.dtypes[0]
    required = [p.default is p.empty for p in inspect.signature(spec.function).parameters.values()]

    def is_plain(sample: Sample) -> bool:
        pairs = zip(sample.args, required, strict=False)
        return not sample.kwargs and all(a.numel() > 1 if torch.is_tensor(a) else a is None or r for a, r in pairs)

    sample = next(filter(is_plain, spec.samples(dtype)))
    bound = inspect.signature(spec.function).bind(*(copied(a) for a in sample.args))
    bound.apply_defaults()
    names = {**bound.arguments, "torch": torch, "F": F, "torch_infini": torch_infini}
    exec(code, names)  # our own docstring
    if isinstance(last, ast.Assign) and not spec.mutates:
        result = as_tuple(eval(ast.unparse(last.targets[0]), names))
    else:
        result = tuple(names[name] for name in spec.mutates)
    actual = as_tuple(call(spec, sample, spec.function))
    relative, absolute = spec.tolerances[dtype]
    for got, want in zip(actual, result, strict=True):
        # The example computes in the op's dtype too: both may be off.
        assert_close(got, want, 4 * relative, 4 * absolute, spec.name)


def test_no_paths_of_one_machine() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    for name in tracked.stdout.split():
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".md", ".cpp", ".h", ".json", ".toml", ".csv", ""}:
            text = path.read_text(errors="ignore")
            assert str(Path.home()) + "/" not in text, name
            assert str(ROOT) not in text, name


def test_readme_examples() -> None:
    """The README's Python blocks run as they stand, one after the other."""
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    assert len(blocks) >= 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block.split("```")[0], names)  # our own page


def test_readme_lists_every_op() -> None:
    page = (ROOT / "README.md").read_text()
    missing = [spec.name for spec in all_op_infos() if f"`{spec.name}`" not in page]
    assert not missing


def test_c_readme_lists_every_operator() -> None:
    """The table of csrc/README.md against the headers."""
    table = (ROOT / "csrc" / "README.md").read_text().split("## Operators")[1].split("## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][2:]
    listed = [name for row in rows for name in row[0].strip().split(", ")]
    headers = "".join(path.read_text() for path in (ROOT / "csrc" / "include" / "infiniop" / "ops").glob("*.h"))
    assert sorted(listed) == sorted(re.findall(r"infiniopDestroy(\w+)Descriptor\(", headers))
    assert all(len(row) == 5 for row in rows)


def test_readme_lists_every_setting() -> None:
    """Environment variables that the sources read, against the README's table."""
    page = (ROOT / "README.md").read_text()
    text = "\n".join(p.read_text() for p in sources(".py", ".cpp", ".h", ".cu", ".cuh") if "tests" not in p.parts)
    read = set(re.findall(r'(?:getenv\(|setting_is_on\(|environ(?:\.get\(|\[))"(\w+)"', text))
    assert "INFINI_CPU_CAPABILITY" in read
    assert not {name for name in read if f"`{name}`" not in page}
