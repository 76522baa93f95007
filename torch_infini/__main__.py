"""python -m torch_infini: generate, chat, serve, bench, demo, run, env, ops, doctor and others on the command line.

Each command is a module of torch_infini/commands with HELP, add_arguments(parser) and run(arguments) -> exit status.
"""

from __future__ import annotations

import argparse
import signal
import sys

from .commands import COMMANDS, VERSION, CommandError


def main(argv: list[str] | None = None) -> int:
    """Run one command; 2 for bad input, after one sentence on stderr; 130 where Ctrl-C ended it."""
    parser = argparse.ArgumentParser(prog="python -m torch_infini", description="Infini kernels for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torch_infini {VERSION}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    for name, module in COMMANDS.items():
        module.add_arguments(subparsers.add_parser(name, help=module.HELP, description=module.HELP))
    arguments = parser.parse_args(argv)
    try:
        return COMMANDS[arguments.command].run(arguments)
    except CommandError as error:
        print(f"torch_infini {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while a model is read, for example
        print(f"torch_infini {arguments.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
