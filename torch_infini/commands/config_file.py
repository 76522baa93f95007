"""OptionTable: options of a command from a YAML file, beside those of the command line, which win."""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from .errors import CommandError

if TYPE_CHECKING:
    import yaml  # type: ignore[import-untyped]  # it has no stubs

log = logging.getLogger("torch_infini")
MAX_BYTES, SHOWN = 64 << 10, 80  # of a file; of a value in a message
TAG = "tag:yaml.org,2002:"
TRUE, FALSE = ("true", "yes", "on"), ("false", "no", "off")  # YAML 1.1
JSON = "JSON"  # the metavar of options that take it; a file may have a mapping instead
MAPPING = "a text of JSON, or a mapping of names to texts, decimal numbers, true or false"


class OptionTable:
    """The options of a parser, for a second source of them.

    Takes the defaults out of the parser, so that its namespaces have only what the command line gives; merge puts them
    back.

    Args:
        parser: All options have been added.
        config: The option that names the file, without dashes.
        secrets: Names of options whose values no message may show.
        alternatives: Pairs of options of which the command line's replaces the other one of the file.
    """

    def __init__(
        self,
        parser: argparse.ArgumentParser,
        config: str,
        secrets: Collection[str] = (),
        alternatives: Mapping[str, str] | None = None,
    ) -> None:
        self._config, self._secrets = config, set(secrets)
        self._alternatives = dict(alternatives or {})
        self._alternatives |= {second: first for first, second in self._alternatives.items()}
        self._actions: dict[str, argparse.Action] = {}
        self._defaults: dict[str, Any] = {}
        for action in parser._actions:  # argparse has no public list of them
            if action.dest != "help":
                long = next(option for option in action.option_strings if option.startswith("--"))
                self._actions[long.removeprefix("--")] = action
                self._defaults[action.dest] = action.default
                action.default = argparse.SUPPRESS

    def merge(self, given: argparse.Namespace) -> argparse.Namespace:
        """Return the options of the command line, then those of its file, then the defaults; CommandError for a file
        that is wrong."""
        path = getattr(given, self._config, None)
        values = {} if path is None else self.read(path)
        for name in list(values):
            other = self._actions.get(self._alternatives.get(name, ""))
            if other is not None and hasattr(given, other.dest):
                del values[name]
        read = {self._actions[name].dest: value for name, value in values.items()}
        return argparse.Namespace(**{**self._defaults, **read, **vars(given)})

    def read(self, path: str) -> dict[str, Any]:
        """Return the options of a file by name; CommandError names the file, the line, the option and the rule."""
        values: dict[str, Any] = {}
        for key, node in self._pairs(path):
            line = f"{path}: line {key.start_mark.line + 1}"
            name = key.value
            action = self._actions.get(name) if name != self._config else None
            if action is None:
                near = difflib.get_close_matches(name.replace("_", "-"), self._actions.keys() - {self._config}, 1)
                hint = f" (is it {near[0]}?)" if near else ""
                raise CommandError(f"{line}: {shown(name)} must be an option of the command, without dashes{hint}")
            if name in values:
                raise CommandError(f"{line}: {name} must stand in the file once, got it again")
            try:
                values[name] = value_of(action, node)
            except ValueError as error:
                came = kind_of(node) if name in self._secrets else came_as(node)
                raise CommandError(f"{line}: {name} must be {error}, got {came}") from None
        if self._secrets & values.keys():
            warn_if_public(path)
        return {name: value for name, value in values.items() if value is not False}

    def _pairs(self, path: str) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
        """Return the keys and values of the file, as nodes: nothing of it is made an object."""
        try:
            import yaml
        except ImportError as error:
            rule = "must not be given without PyYAML (pip install 'torch_infini[serve]')"
            raise CommandError(f"--{self._config} {rule}, got {error}") from None
        text = read_text(path, f"--{self._config}", MAX_BYTES)
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except RecursionError:
            raise CommandError(f"{path} must be YAML of options and values, got deeper nesting") from None
        except yaml.MarkedYAMLError as error:
            at = error.problem_mark or error.context_mark
            line = "" if at is None else f": line {at.line + 1}"
            cause = " ".join(filter(None, (error.context, error.problem)))
            cause = re.sub(r"'[^']{2,}'", "'...'", cause)  # it may be a part of a key
            raise CommandError(f"{path}{line}: the file must be YAML, got an error: {cause}") from None
        except yaml.YAMLError as error:
            raise CommandError(f"{path}: the file must be YAML, got an error: {' '.join(str(error).split())}") from None
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise CommandError(f"{path}: the file must have lines like 'port: 8000', got {kind_of(root)}")
        for key, _ in root.value:
            if not isinstance(key, yaml.ScalarNode):
                line = f"{path}: line {key.start_mark.line + 1}"
                raise CommandError(f"{line}: the name of an option must be a word, got {kind_of(key)}")
        pairs: list[tuple[yaml.ScalarNode, yaml.Node]] = root.value
        return pairs


def read_text(path: str, option: str, most: int) -> str:
    """Return the text of a file that an option names; CommandError if it cannot be read or is larger than `most`."""
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise CommandError(f"{option} must name a file that can be read, got {path!r}: {cause}") from None
    if len(data) > most:
        raise CommandError(f"{option} must name a file of at most {most} bytes, got {path!r} with more")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise CommandError(f"{option} must name a file in UTF-8, got {path!r} with other bytes") from None


def warn_if_public(path: str) -> None:
    """Warn if users other than a file's owner and group can read it."""
    if os.stat(path).st_mode & stat.S_IROTH:
        log.warning("%s has a key and can be read by every user: chmod o-r", path)


def value_of(action: argparse.Action, node: yaml.Node) -> Any:
    """Return an option's value; ValueError with the rule if it is another."""
    if action.metavar == JSON:
        return json_of(node) if node.id == "mapping" else scalar_of(action, node, MAPPING)
    is_list = action.nargs == "+" or isinstance(action, argparse._AppendAction)
    if node.id == "sequence" and is_list:
        return [scalar_of(action, one, "a list of texts") for one in node.value] or fail("a list of at least one text")
    value = scalar_of(action, node, "a text or a list of texts" if is_list else None)
    return [value] if is_list else value


def scalar_of(action: argparse.Action, node: yaml.Node, rule: str | None) -> Any:
    """Return a single value; ValueError with the rule, by default that of the option's type."""
    tag = node.tag.removeprefix(TAG) if node.id == "scalar" else None
    text = node.value
    if action.nargs == 0:  # a switch
        return fail("true or false") if tag != "bool" else text.lower() in TRUE
    if action.type is int:
        is_decimal = tag == "int" and re.fullmatch(r"[-+]?(0|[1-9]\d*)", text)  # in YAML, 010 is 8 and 1:30 is 90
        return int(text) if is_decimal and len(text) <= 20 else fail("an integer in decimal digits")
    if action.type is float:
        try:
            value = float(text) if tag in ("int", "float", "str") else math.nan
        except ValueError:
            value = math.nan
        return value if math.isfinite(value) else fail("a number")
    if action.choices is not None:
        # YAML reads a plain `off` or `1` as another type than a text: the choices decide.
        return text if tag is not None and text in action.choices else fail(" or ".join(map(str, action.choices)))
    if tag != "str":
        return fail(rule or ("a text, in quotes" if tag in ("int", "float", "bool", "timestamp") else "a text"))
    return text


def json_of(node: yaml.Node) -> str:
    """Return the JSON of a mapping whose values are single; ValueError with the rule for another."""
    fields: dict[str, Any] = {}
    for key, value in node.value:
        if key.id != "scalar" or value.id != "scalar":
            fail(MAPPING)
        if key.value in fields:
            fail(f"a mapping with {shown(key.value)} once")
        tag, text = value.tag.removeprefix(TAG), value.value
        if tag == "bool":
            fields[key.value] = text.lower() in TRUE
        elif tag in ("int", "float") and re.fullmatch(r"[-+]?(0|[1-9]\d{0,17})(\.\d+)?", text):  # 010 is 8 in YAML
            fields[key.value] = float(text) if "." in text else int(text)
        else:
            fields[key.value] = text if tag == "str" else fail(MAPPING)
    return json.dumps(fields)


def fail(rule: str) -> Any:
    raise ValueError(rule)


def kind_of(node: yaml.Node) -> str:
    """Return what a node is, without its value."""
    if node.id != "scalar":
        return {"sequence": "a list", "mapping": "a mapping"}[node.id]
    kinds = {"str": "a text", "int": "a number", "float": "a number", "bool": "true or false", "null": "nothing"}
    return kinds.get(node.tag.removeprefix(TAG), "a value of another type")


def came_as(node: yaml.Node) -> str:
    """Return a node for a message: a single value itself, of others the kind."""
    return shown(node.value) if node.id == "scalar" and node.value else kind_of(node)


def shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
