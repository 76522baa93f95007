"""What a repository's host reads: workflows, forms for issues, the citation; what they name is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torch_infini
from torch_infini._core.library import OLDEST_TORCH
from torch_infini.commands import COMMANDS

yaml: Any = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def targets() -> set[str]:
    """The targets of the Makefile."""
    return {
        name
        for line in re.findall(r"^([\w. -]+):(?!=)", (ROOT / "Makefile").read_text(), re.M)
        for name in line.split()
    }


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows(path: Path) -> None:
    """Jobs have a machine, a limit and steps; actions a version; what is run by make is a target, by us a command."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"} and workflow[True]  # YAML 1.1 reads `on` as true
    for job in workflow["jobs"].values():
        assert job["runs-on"].startswith("ubuntu-") and 0 < job["timeout-minutes"] <= 120
        assert set(job.get("needs", "").split()) <= workflow["jobs"].keys()
        for step in job["steps"]:
            assert len(step.keys() & {"uses", "run"}) == 1
            assert re.fullmatch(r"[\w/-]+@v\d+", step.get("uses", "a@v1"))
            for target in re.findall(r"\bmake ([\w-]+)", step.get("run", "")):
                assert target in targets(), target
            for command in re.findall(r"python -m torch_infini (\w+)", step.get("run", "")):
                assert command in COMMANDS, command


def test_the_wheel_is_tried_in_every_python() -> None:
    """All that the wheel is built for, from the oldest that pyproject.toml takes on; with the oldest torch too."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text())["jobs"]
    tried = jobs["try"]["strategy"]["matrix"]["python"]
    (setup,) = (step for step in jobs["build"]["steps"] if "setup-python" in step.get("uses", ""))
    assert setup["with"]["python-version"].split() == tried
    torches = jobs["try"]["strategy"]["matrix"]["torch"]
    assert torches[0] == f"{'.'.join(map(str, OLDEST_TORCH))}.0" and len(set(torches)) > 1
    assert f'requires-python = ">={tried[0]}"' in (ROOT / "pyproject.toml").read_text()
    assert (
        f"range({tried[0].split('.')[1]}, {int(tried[-1].split('.')[1]) + 1})"
        in (ROOT / ".ci" / "wheel.py").read_text()
    )


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms(path: Path) -> None:
    """Each asks for what `env` prints, and every field has a label."""
    form = yaml.safe_load(path.read_text())
    assert form["name"] and form["description"]
    assert all(field["type"] in ("input", "textarea") and field["attributes"]["label"] for field in form["body"])
    assert len({field["id"] for field in form["body"]}) == len(form["body"])
    (env,) = (field for field in form["body"] if field["id"] == "env")
    assert env["attributes"]["label"] == "python -m torch_infini env" and env["validations"]["required"]


def test_one_version() -> None:
    """Of the package, the citation, the change log and the command line."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == torch_infini.__version__ and citation["license"] == "MIT"
    assert torch_infini.__version__ in (ROOT / "CHANGELOG.md").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "torch_infini", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"torch_infini {torch_infini.__version__}\n"


def test_the_container_calls_make() -> None:
    """Stages and targets are there; what a clone has built stays outside."""
    lines = re.sub(r"\\\n", "", (ROOT / ".ci" / "Dockerfile").read_text()).splitlines()
    stages: list[str] = []
    for name, rest in (line.split(" ", 1) for line in lines if line and not line.startswith("#")):
        assert name in ("FROM", "RUN", "WORKDIR", "COPY"), name
        if name == "FROM":
            base, stage = re.fullmatch(r"(\S+) AS (\w+)", rest).groups()  # type: ignore[union-attr]
            assert base in stages or base == "scratch" or ":" in base
            stages.append(stage)
        for stage in re.findall(r"--from=(\w+)", rest):
            assert stage in stages
        for target in re.findall(r"^make (\S+)", rest):
            assert target in targets(), target
    head = "\n".join(line for line in lines if line.startswith("#"))
    assert set(re.findall(r"--target (\w+)", head)) <= set(stages) and stages == ["build", "test", "wheel", "dist"]
    ignored = (ROOT / ".ci" / "Dockerfile.dockerignore").read_text().splitlines()
    made = {line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if line.endswith("/")}
    assert {name for name in made if not name.startswith((".pytest", ".ruff", ".hypo", "__", "*"))} <= set(ignored)


def test_the_recipe_of_conda() -> None:
    """It has the version, the licence and the requirements that are elsewhere too, and targets that are there."""
    recipe = yaml.safe_load((ROOT / ".ci" / "conda" / "recipe.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert recipe["context"]["version"] == torch_infini.__version__ and recipe["about"]["license"] == "MIT"
    assert recipe["about"]["summary"] in project
    wanted = recipe["requirements"]
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f"pytorch >={oldest}" in wanted["run"] and f"pytorch-cpu >={oldest}" in wanted["host"]
    (transformers,) = set(re.findall(r'"transformers(>=[^"]+)"', project))
    assert f"transformers {transformers}" in wanted["run_constraints"]
    assert "python >=3.10" in wanted["run"] and 'requires-python = ">=3.10"' in project
    (build,) = re.findall(r"requires = \[(.*)\]", project)
    needed = [re.sub(r"(>=)", r" \1", one) for one in re.findall(r'"([^"]+)"', build)]
    assert set(needed) <= set(wanted["host"])
    for line in recipe["build"]["script"]:
        for target in re.findall(r"^make (\S+)", line):
            assert target in targets()
    command = recipe["tests"][1]["script"][0].split()
    assert command[3] in COMMANDS and set(command[5].split(",")) <= set(torch_infini.ops.REGISTRY)
