"""``fsdp plan | migrate | convert | run``, also as ``python -m fsdp``: the tools that work outside of a run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fsdp.tools import convert, migrate, plan


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 for success; 1 if ``migrate`` leaves changes to the user; exit with 2 for an error."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["run"]:  # in a new process image: fsdp.compat changes torch
        os.execv(sys.executable, [sys.executable, "-m", "fsdp.compat", *arguments[1:]])
    parser = _Parser(prog="fsdp", description="Tools of the fsdp package.")
    commands = parser.add_subparsers(required=True)
    for name, tool, text in (
        ("plan", plan, "memory and traffic of every rank under every strategy, before a run"),
        ("migrate", migrate, "the changes that a script for DistributedDataParallel or torch's FSDP needs"),
        (
            "convert",
            convert,
            "a checkpoint for other programs (safetensors, torch.distributed.checkpoint), or of theirs",
        ),
    ):
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        tool.add_arguments(command)
        command.set_defaults(run=tool.run, parser=command)
    commands.add_parser("run", help="run a script, or -m module, with this package in the place of torch's FSDP1")
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except (OSError, RuntimeError, SyntaxError, TypeError, ValueError) as error:
        options.parser.error(str(error))
    return code


if __name__ == "__main__":
    sys.exit(main())
