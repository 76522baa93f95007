"""The commands of python -m torch_infini, by name."""

from . import demo, doctor, env, ops, root
from .errors import CommandError

COMMANDS = {"demo": demo, "doctor": doctor, "env": env, "ops": ops, "root": root}

__all__ = ["COMMANDS", "CommandError"]
