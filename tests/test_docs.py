"""What the files and docstrings promise: every source says what it is for, every example does what its op does."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F

import torch_infini
from torch_infini.ops import all_ops
from torch_infini.testing import as_tuple, call
from torch_infini.testing.compare import assert_close, copied
from torch_infini.testing.ops import OpInfo, Sample, all_c_ops, all_op_infos
from torch_infini.testing.processes import forking

ROOT = Path(__file__).resolve().parent.parent


def sources(*suffixes: str) -> list[Path]:
    """The project's own files."""
    folders = ("csrc", "torch_infini", "tests", "benchmarks")
    found = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.suffix in suffixes]
    return sorted(p for p in [*found, *ROOT.glob("*.py")] if p.suffix in suffixes)


def test_python_files_say_what_they_are_for() -> None:
    """They open with a docstring."""
    silent = [path for path in sources(".py") if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


def test_native_files_say_what_they_are_for() -> None:
    """They open with a comment."""
    native = sources(".h", ".cpp", ".cu", ".cuh", ".hpp")
    assert not [path for path in native if not path.read_text().startswith(("// ", "/* "))]


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
        result = tuple(names[name] for name in spec.mutates if names[name] is not None)
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


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "csrc" / "README.md"])
RUNNING = [page for page in PAGES if "```python\n" in page.read_text()]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, kind: str) -> list[str]:
    """The page's blocks of code with this after the backquotes."""
    return [block.split("```")[0] for block in page.read_text().split(f"```{kind}\n")[1:]]


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def run_script(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full(beyond=2)
@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_examples_of_pages(page: Path, tmp_path: Path) -> None:
    """A page's Python blocks run as they stand, one after the other."""
    pytest.importorskip("transformers")
    if page.name == "server.md":
        pytest.importorskip("fastapi")
    script, output = tmp_path / "page.py", tmp_path / "output"
    script.write_text("\n".join(blocks(page, "python")))
    process = forking().Process(target=run_page, args=(script, output))
    process.start()
    process.join()
    assert process.exitcode == 0, output.read_text()


def run_page(script: Path, output: Path) -> None:
    """Run a script as a program of one thread, in this process; what it prints goes to a file."""
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    runpy.run_path(str(script), run_name="__main__")


def test_pages_that_must_have_examples() -> None:
    pages = ("README.md", "docs/patching.md", "docs/compiling.md", "docs/ops.md", "docs/engine.md", "docs/infinilm.md")
    assert {name_of(page) for page in RUNNING} >= set(pages)
    assert len(blocks(ROOT / "README.md", "python")) == 4


@pytest.mark.full
@pytest.mark.parametrize("number", range(2))
def test_examples_under_torchrun(number: int, tmp_path: Path) -> None:
    """docs/distributed.md's scripts, by two ranks."""
    pytest.importorskip("transformers")
    scripts = blocks(ROOT / "docs" / "distributed.md", "python torchrun")
    assert len(scripts) == 2
    script = tmp_path / "program.py"
    script.write_text(scripts[number])
    output = run_script("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    assert ("tensor([4., 4., 4., 4.])" in output) if number == 0 else ("all_reduce" in output)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links name files, and headings in them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for link in LINK.findall(text):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: there is no {link}"
        assert not heading or heading in anchors(target), f"{name_of(page)}: there is no heading {link}"


def test_files_of_the_architecture_exist() -> None:
    """By their names: a file that moves to another folder is still found by it."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w./]+\.(?:py|cpp|cu|h|cuh))`", re.sub(r"```.*?```", "", text, flags=re.S))
    known = {path.name for path in sources(".py", ".cpp", ".cu", ".h", ".cuh")}
    assert len(named) > 40
    assert not [name for name in named if Path(name).name not in known]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=name_of)
def test_pages_begin_with_an_example_and_end_with_the_next(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("# ") and "```" in text.split("\n## ")[0], "a page must begin with an example"
    assert text.rstrip().rsplit("\n\n", 1)[1].startswith("Next: "), "a page must end with where to go next"
    index = (ROOT / "docs" / "README.md").read_text()
    assert page.name == "README.md" or f"({page.name})" in index, "docs/README.md must list the page"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 10_000


def test_terms_are_not_forbidden() -> None:
    """No word of the terms' first column in docs/style.md is in the column of words to avoid."""
    text = (ROOT / "docs" / "style.md").read_text()
    lines = text.partition("| term | meaning here | not |\n")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    terms, forbidden = ({word.strip() for row in cells for word in row[column].split(",")} for column in (0, 2))
    assert len(cells) > 15 and not terms & forbidden


def test_absent_tensors_are_marked_by_their_dtype() -> None:
    """csrc/common/tensor_view.h has the rule; the comment of an argument must not name another mark."""
    wrong = re.compile(r"TensorView [\w, \[\]]+;\s*//.*\bnull(ptr)?\b")
    headers = [path for ending in ("*.h", "*.cuh") for path in (ROOT / "csrc").rglob(ending)]
    assert not [f"{name_of(path)}: {found[0]}" for path in headers for found in wrong.finditer(path.read_text())]


@pytest.fixture
def docs() -> Any:
    return load_docs(ROOT)


def load_docs(root: Path) -> Any:
    """A repository's .ci/docs.py, imported."""
    spec = importlib.util.spec_from_file_location("ci_docs", root / ".ci" / "docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_sections_are_up_to_date(docs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What `make check-docs` runs."""
    status = docs.main(["--check"])
    assert status == 0, capsys.readouterr().out
    sections = [docs.BEGIN.fullmatch(line) for page in docs.pages() for line in page.read_text().splitlines()]
    names = [section["name"] for section in sections if section]
    some = {"ops", "c operators", "c headers", "table ops", "table c_abi", "table serve", "libraries", "folders ."}
    assert some <= set(names)


@pytest.mark.parametrize("page", ["docs/ops.md", "docs/speed.md", "csrc/README.md", "csrc/include/infiniop.h"])
def test_a_section_edited_by_hand_is_found(
    page: str, docs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (ROOT / page).read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if docs.BEGIN.fullmatch(line))
    section = docs.BEGIN.fullmatch(lines[begin])["name"]
    edited = tmp_path / "page"
    monkeypatch.setattr(docs, "pages", lambda: [edited])
    changed = [*lines[: begin + 3], lines[begin + 3].replace(" ", "  ", 1), *lines[begin + 4 :]]
    for text, at in ((changed, begin + 4), ([*lines[: begin + 3], *lines[begin + 4 :]], begin + 4)):
        edited.write_text("\n".join(text) + "\n")
        assert docs.main(["--check"]) == 1
        assert f"docs: {edited}:{at}, section '{section}': must be\n  {lines[at - 1]}\ngot\n" in capsys.readouterr().out
        assert edited.read_text() == "\n".join(text) + "\n"  # a check writes nothing
    assert docs.main([]) == 0
    assert edited.read_text().splitlines() == lines


def test_a_plot_that_is_older_than_its_figures_is_found(
    docs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that pages show; a figure that changes in the CSV file changes the plot."""
    shown = {name_of(path): draw for path, draw in docs.plots().items()}
    names = {"zen-4/engine-1.1B", "zen-5/generate", "zen-5/collectives", "xeon-amx/error-bits"}
    assert set(shown) == {f"benchmarks/results/{name}.svg" for name in names}
    table, plot = tmp_path / "engine.csv", tmp_path / "engine.svg"
    draw = next(iter(shown.values())).func
    monkeypatch.setattr(docs, "WHOLE", {plot: lambda: draw(table)})
    monkeypatch.setattr(docs, "pages", lambda: [plot])
    figures = (ROOT / "benchmarks" / "results" / "zen-4" / "engine-1.1B.csv").read_text()
    table.write_text(figures)
    plot.write_text("")
    assert docs.main([]) == 0 and docs.main(["--check"]) == 0
    capsys.readouterr()
    table.write_text(figures.replace(",9.423,", ",94.23,"))
    assert docs.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"docs: {plot}:") and "must be\n  <rect" in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "<!-- generated by make docs: opps -->\n<!-- end -->\n",
            "page:1: a section must be one of ops, c operators, ",
        ),
        ("<!-- generated by make docs: table opps -->\n<!-- end -->\n", "page:1: a section must be one of ops, "),
        ("<!-- generated by make docs: ops -->\n", "page:1: section 'ops' must end with <!-- end -->, got the end of"),
        ("a\n<!-- end -->\n", "page:2: an end must follow a section's begin, got none"),
        (
            "<!-- generated by make docs: ops -->\n<!-- generated by make docs: ops -->\n",
            "page:2: section 'ops' of line 1 must end first, got <!-- generated by make docs: ops -->",
        ),
    ],
)
def test_wrong_marks_are_named(text: str, sentence: str, docs: Any, tmp_path: Path) -> None:
    with pytest.raises(docs.PageError, match="^" + re.escape(sentence)):
        docs.written(Path("page"), text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The repository again, by links, in which folders of torch_infini and csrc can be added."""
    for path in ROOT.iterdir():
        if path.name in (".ci", "csrc", "torch_infini"):
            (tmp_path / path.name).mkdir()
            for inner in path.iterdir():
                (tmp_path / path.name / inner.name).symlink_to(inner)
        elif path.name not in (".git", "build"):
            (tmp_path / path.name).symlink_to(path)
    script = tmp_path / ".ci" / "docs.py"
    script.unlink()
    script.write_bytes((ROOT / ".ci" / "docs.py").read_bytes())  # it looks for the repository around itself
    return tmp_path


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize(
    "file, text, found",
    [
        ("torch_infini/attic/__init__.py", '"""Old things."""', ["architecture.md:", "architecture.svg:"]),
        ("torch_infini/nn_tools.py", '"""Tools."""\nfrom .nn import Linear', ["architecture.md:", "architecture.svg:"]),
        ("csrc/attic/README.md", "# Attic\n\nOld kernels. They are slow.", ["architecture.md:"]),
        ("attic/README.md", "Old things.", ["CONTRIBUTING.md:"]),
    ],
)
def test_a_new_folder_makes_pages_and_picture_old(
    file: str, text: str, found: list[str], tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = load_docs(tree)
    assert docs.main(["--check"]) == 0, capsys.readouterr().out
    (tree / file).parent.mkdir(exist_ok=True)
    (tree / file).write_text(text)
    assert docs.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert [name for name in ("CONTRIBUTING.md:", "architecture.md:", "architecture.svg:") if name in said] == found


@pytest.mark.parametrize("folder, file", [("csrc", "README.md"), ("torch_infini", "__init__.py")])
def test_a_folder_that_does_not_say_what_it_is_for(folder: str, file: str, tree: Path) -> None:
    (tree / folder / "attic").mkdir()
    rule = f"{folder}/attic/{file} must begin with a sentence of at most 130 characters that says what attic is for"
    with pytest.raises(SystemExit, match=rule):
        load_docs(tree).main(["--check"])


def test_a_library_made_of_a_new_folder_is_found(tree: Path) -> None:
    (tree / "csrc" / "attic").mkdir()
    (tree / "csrc" / "attic" / "README.md").write_text("Old kernels.")
    (tree / "csrc" / "attic" / "old.cpp").write_text("// Nothing.")
    table = list(load_docs(tree).libraries_table())
    assert next(line for line in table if line.startswith("| `libinfiniop` |")).count("csrc/attic") == 1


def test_libraries_are_those_that_are_built(docs: Any) -> None:
    listed = re.findall(r"^\| `(\w+)` \|", "\n".join(docs.libraries_table()), re.M)
    built = {re.match(r"\w+", path.name)[0] for path in (ROOT / "torch_infini" / "lib").glob("*.so")}
    assert built <= set(listed) and set(listed) - built <= {"_infinicore", "libinfini_device"}


def test_picture_has_the_words_of_the_table_within_its_boxes(docs: Any) -> None:
    """And the same bytes again: what it is made of has no order of its own."""
    text = docs.picture()
    assert text == docs.picture() and "prefers-color-scheme: dark" in text
    kind = "{http://www.w3.org/2000/svg}"
    boxes: list[tuple[float, float, str]] = []
    for part in ElementTree.fromstring(text):
        if part.tag == f"{kind}rect" and part.get("class") != "page":
            boxes.append((float(part.get("x", 0)), float(part.get("width", 0)), ""))
        elif part.tag == f"{kind}text" and part.get("class") != "name head":
            x, width, words = boxes[-1]
            assert x < float(part.get("x", 0)) < x + width
            assert len(part.text or "") * 5.5 < width, "the mean width of a letter of Helvetica at 11 pixels"
            boxes[-1] = (x, width, f"{words} {part.text}".strip())
    shown = {words.split(" ", 1)[0]: words.split(" ", 1)[1] for _, _, words in boxes}
    assert shown["engine"].startswith("The engine: ") and "libtorch_infini" in shown
    names = {
        line.split("/")[1].split("]")[0] for line in docs.folders_table("torch_infini", docs.PICTURE) if "/" in line
    }
    assert {name.removesuffix(".py") for name in names} <= shown.keys()


def test_ops_have_a_line_each(docs: Any) -> None:
    """The table of docs/ops.md: an op that is registered is in it, with the first line of its documentation."""
    lines = list(docs.ops_table())[2:]
    assert [line.split("|")[1].strip(" `") for line in lines] == [spec.name for spec in all_ops()]
    for line in lines:
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        assert len(cells) == 5 and all(cell.strip() for cell in cells), line
        assert cells[1].strip().endswith("."), f"the first line of a docstring must be one sentence: {line}"


def test_stub_names_what_is_there(docs: Any) -> None:
    """The text for type checkers imports what torch_infini.ops has, from where it is."""
    found = {}
    for node in ast.parse(docs.ops_stub()).body:
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(f"torch_infini.ops.{node.module}")
            found |= {alias.asname: getattr(module, alias.name) for alias in node.names}
    assert sorted(found) == sorted(torch_infini.ops.__all__)
    assert all(getattr(torch_infini.ops, name) is value for name, value in found.items())


def test_c_headers_state_dtypes_that_are_tested(docs: Any) -> None:
    """The floating-point dtypes in a header's comment are those that its samples have."""
    names = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
    ops = {op.name: op for op in all_c_ops()}
    for header in docs.C_OPS.glob("*.h"):
        stated = docs.marked_line(header, "Dtypes")
        for name in docs.operators(header):
            tensors = [t for sample in ops[name].samples() for t in sample.args.values()]
            dtypes = {getattr(t, "dtype", None) or getattr(getattr(t, "base", None), "dtype", None) for t in tensors}
            tested = {names[dtype] for dtype in dtypes if dtype in names}
            if stated != "all":
                assert tested == set(re.findall(r"\bB?F\d\d\b", stated)), header.name


def test_every_setting_is_listed() -> None:
    """Environment variables that the sources read, against the tables of docs/settings.md."""
    page = (ROOT / "docs" / "settings.md").read_text()
    text = "\n".join(p.read_text() for p in sources(".py", ".cpp", ".h", ".cu", ".cuh") if "tests" not in p.parts)
    read = set(re.findall(r'(?:getenv\(|setting_is_on\(|environ(?:\.get\(|\[))"(\w+)"', text))
    assert "INFINI_CPU_CAPABILITY" in read
    assert not {name for name in read if f"`{name}`" not in page}
