"""docs/examples: the unit of systemd, the Containerfile and compose.yaml have what their formats and `serve` know.

Nothing is built or started: names, options and paths are compared.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path

import pytest

pytest.importorskip("yaml")

import yaml

from torch_infini.commands import serve

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"
# Options of systemd.unit, systemd.service, systemd.exec and systemd.resource-control that the unit may have.
UNIT = {
    "Unit": {"Description", "Documentation", "After", "Wants", "Requires"},
    "Service": {"ExecStart", "LoadCredential", "Environment", "Restart", "RestartSec", "TimeoutStopSec", "LimitNOFILE"}
    | {"DynamicUser", "CacheDirectory", "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices"}
    | {"ProtectKernelTunables", "ProtectKernelModules", "ProtectControlGroups", "NoNewPrivileges"}
    | {"RestrictAddressFamilies", "CapabilityBoundingSet"},
    "Install": {"WantedBy"},
}
INSTRUCTIONS = {"FROM", "RUN", "ENV", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
COMPOSE = {"build", "command", "ports", "volumes", "secrets", "restart", "stop_grace_period", "read_only", "tmpfs"}
COMPOSE |= {"cap_drop", "security_opt"}
PREFIX = ["python", "-m", "torch_infini", "serve"]


def options(arguments: list[str]) -> argparse.Namespace:
    """The options of `serve`, with the example's serve.yaml for the path of one."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    here = [str(EXAMPLES / "serve.yaml") if one == "/etc/torch_infini/serve.yaml" else one for one in arguments]
    given = parser.parse_args(here)
    return given.options.merge(given)


def unit() -> RawConfigParser:
    found = RawConfigParser(delimiters="=", comment_prefixes="#", strict=True)
    found.optionxform = str  # type: ignore[assignment, method-assign]  # names are case-sensitive
    found.read_string((EXAMPLES / "torch_infini.service").read_text())
    return found


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Containerfile: (name, the rest of it)."""
    lines = [line for line in (EXAMPLES / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def only(name: str) -> str:
    (found,) = [rest for instruction, rest in instructions() if instruction == name]
    return found


def test_serve_yaml() -> None:
    found = options(["--config", str(EXAMPLES / "serve.yaml")])
    assert (found.port, found.host, found.log_requests) == (8000, ["0.0.0.0"], True)


def test_the_unit() -> None:
    found = unit()
    assert set(found.sections()) == UNIT.keys()
    for section in found.sections():
        assert set(found[section]) <= UNIT[section], section
    service = found["Service"]
    program, *arguments = shlex.split(service["ExecStart"])
    assert program == "/opt/torch_infini/bin/python" and arguments[:3] == PREFIX[1:]
    parsed = options(arguments[3:])
    name, _, source = service["LoadCredential"].partition(":")
    assert parsed.api_key_file == f"%d/{name}" and source.startswith("/")
    assert int(service["TimeoutStopSec"]) > parsed.drain + 2
    assert int(service["LimitNOFILE"]) > 4096
    variables = dict(one.split("=") for one in service["Environment"].split())
    assert variables == {"HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": f"/var/cache/{service['CacheDirectory']}"}


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    copy = tmp_path / "torch_infini.service"
    text = (EXAMPLES / "torch_infini.service").read_text()
    copy.write_text(text.replace("/opt/torch_infini/bin/python", f'"{sys.executable}"'))  # its path may have spaces
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "torch_infini.service:" not in done.stderr, done.stderr
    copy.write_text(copy.read_text().replace("PrivateTmp", "PrivateTemp"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "PrivateTemp" in done.stderr, "what this test would not see"


def test_the_containerfile() -> None:
    found = instructions()
    assert {name for name, _ in found} <= INSTRUCTIONS
    stages = [rest.split() for name, rest in found if name == "FROM"]
    assert stages[0][1:] == ["AS", "build"] and len({stage[0] for stage in stages}) == 1, "one Python for both"
    assert re.search(r"python:3\.1[0-9]-", stages[0][0])
    entry, command = json.loads(only("ENTRYPOINT")), json.loads(only("CMD"))
    assert entry == PREFIX and options(command).model == "/srv/models/model"
    assert int(only("EXPOSE")) == options(command).port == options(["--config", str(EXAMPLES / "serve.yaml")]).port
    assert only("STOPSIGNAL") == "SIGTERM"
    for name, rest in found:
        if name == "COPY" and "--from" not in rest:
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), sources
    pinned = re.search(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert pinned and f" torch=={pinned[1]}\n" in "".join(f"{rest}\n" for _, rest in found)


def test_what_the_containerfile_runs_has_these_options() -> None:
    """pip's are those of its help; the others are few."""
    known = {"apt-get": {"-y", "--no-install-recommends"}, "rm": {"-rf"}, "python": {"-m"}}
    known["useradd"] = {"--system", "--create-home"}
    pip = subprocess.run([sys.executable, "-m", "pip", "install", "--help"], capture_output=True, text=True, check=True)
    known["pip"] = set(re.findall(r"--[a-z-]+", pip.stdout))
    for rest in (rest for name, rest in instructions() if name == "RUN"):
        for command in rest.split(" && "):
            program, *arguments = shlex.split(command)
            assert {one for one in arguments if one.startswith("-")} <= known[program], command
    head, _, check = only("HEALTHCHECK").partition("CMD ")
    assert re.findall(r"--([a-z-]+)=\d+s", head) == ["interval", "timeout", "start-period"]
    program, option, code = json.loads(check)
    assert (program, option) == ("python", "-c") and "http://127.0.0.1:8000/health" in code
    ast.parse(code)


def test_what_the_build_sends() -> None:
    """All sources, and nothing that was built in the clone."""
    lines = (EXAMPLES / "Containerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    sources = [rest.split()[:-1] for name, rest in instructions() if name == "COPY" and "--from" not in rest]
    assert kept == {source for group in sources for source in group}
    assert lines.index("*") < lines.index("!torch_infini") < lines.index("torch_infini/lib")


def test_compose() -> None:
    found = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    assert found.keys() == {"services", "secrets"}
    service = found["services"]["torch_infini"]
    assert service.keys() <= COMPOSE
    assert (EXAMPLES / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    parsed = options(service["command"])
    assert service["ports"] == [f"127.0.0.1:{parsed.port}:{only('EXPOSE')}"] and parsed.host == ["0.0.0.0"]
    assert [f"/run/secrets/{name}" for name in service["secrets"]] == [parsed.api_key_file]
    assert service["secrets"] == list(found["secrets"])
    targets = {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
    assert targets["/etc/torch_infini/serve.yaml"] == "./serve.yaml" and all(
        v.endswith(":ro") for v in service["volumes"]
    )
    assert any(parsed.model.startswith(f"{target}/") for target in targets)
    assert int(service["stop_grace_period"].removesuffix("s")) > parsed.drain + 2
