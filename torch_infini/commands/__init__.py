"""The command line, `python -m torch_infini`: a module for each command (generate, chat, serve, doctor and others)."""

from .. import __version__ as VERSION
from . import bench, chat, demo, describe, device, doctor, env, generate, ops, quantize, root, run, serve, tune, vllm
from .errors import CommandError

COMMANDS = {
    "bench": bench,
    "chat": chat,
    "demo": demo,
    "describe": describe,
    "device": device,
    "doctor": doctor,
    "env": env,
    "generate": generate,
    "ops": ops,
    "quantize": quantize,
    "root": root,
    "run": run,
    "serve": serve,
    "tune": tune,
    "vllm": vllm,
}

__all__ = ["COMMANDS", "VERSION", "CommandError"]
