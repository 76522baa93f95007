"""chat: a conversation with a model in the terminal; answers are streamed, each followed by its speed."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CommandError
from .model import add_model_arguments, load
from .sampling import add_sampling_arguments, sampling_of

if TYPE_CHECKING:
    from ..engine import LLM, SamplingParams

HELP = "talk with a model that has a chat template"
COMMANDS = """\
/reset         forget the conversation; the system message stays
/system TEXT   begin anew with a system message; without TEXT: with none
/save FILE     write the conversation as JSON
/help          this list
/exit          end, as Ctrl-D does; Ctrl-C ends an answer
A line that ends in \\ goes on in the next one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: none)")
    add_sampling_arguments(parser, max_new_tokens=1024, temperature=0.7)


class Chat:
    """A conversation.

    Args:
        llm: The model; its tokenizer must have a chat template.
        params: The settings of every answer.
        system: The system message; None: none.

    Attributes:
        messages: The messages so far, as LLM.chat takes them.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm, self._params, self._system = llm, params, system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Drop all messages but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def take(self, line: str) -> bool:
        """Run a line that begins with "/" as a command, answer any other; return whether the conversation continues."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if not line.strip():
            return True
        if not line.startswith("/"):
            self.answer(line)
        elif command == "/exit":
            return False
        elif command == "/reset":
            self.reset()
        elif command == "/system":
            self._system = rest or None
            self.reset()
        elif command == "/save" and rest:
            self.save(rest)
        else:
            print(COMMANDS)
        return True

    def save(self, path: str) -> None:
        """Write the messages to a file; print the result or the error."""
        try:
            Path(path).write_text(json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            print(f"not saved: {error}")
        else:
            print(f"saved {len(self.messages)} messages to {path}")

    def answer(self, text: str) -> None:
        """Print the model's answer and its speed. Ctrl-C ends it; the partial answer stays in the conversation."""
        self.messages.append({"role": "user", "content": text})
        answer, output = "", None
        try:
            for output in self._llm.stream(self._llm.chat_prompt(self.messages), self._params):
                answer += output.outputs[0].new_text
                print(output.outputs[0].new_text, end="", flush=True)
        except ValueError as error:  # a template that refuses the roles, a conversation beyond the context
            self.messages.pop()
            print(f"no answer: {error} (/reset begins anew)")
            return
        except KeyboardInterrupt:
            pass
        print()
        if output is None or output.outputs[0].error is not None:
            self.messages.pop()
            print(f"no answer: {'interrupted' if output is None else output.outputs[0].error}")
            return
        self.messages.append({"role": "assistant", "content": answer})
        tokens, first = len(output.outputs[0].token_ids), output.metrics.time_to_first_token
        if tokens > 1 and first is not None and output.metrics.time is not None:
            speed = (tokens - 1) / (output.metrics.time - first)
            print(f"[{tokens} tokens, {speed:.1f} tok/s, the first after {1e3 * first:.0f} ms]")


def read_message(prompt: str) -> str:
    """Return a line of stdin and its continuation lines; EOFError at the end."""
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("  " if prompt else ""))
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    params = sampling_of(arguments)
    llm = load(arguments, max_num_seqs=1)
    tp_group = llm.engine.model.tp_group
    if tp_group is not None and tp_group.workers is None:
        raise CommandError(
            "under torchrun every rank would ask: call it without, --tensor-parallel-size starts the ranks"
        )
    try:
        llm.chat_prompt([{"role": "user", "content": "?"}])  # fails before the first question if there is no template
    except ValueError as error:
        raise CommandError(str(error)) from error
    chat = Chat(llm, params, arguments.system)
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        print("/help lists the commands, Ctrl-D ends")
        with suppress(ImportError):  # keys to edit and to repeat a line
            import readline  # noqa: F401
    while True:
        try:
            line = read_message(prompt)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if not chat.take(line):
            return 0
