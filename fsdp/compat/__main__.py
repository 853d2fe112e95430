"""usage: fsdp run SCRIPT ARGUMENTS, or fsdp run -m MODULE ARGUMENTS

Run a program that was written for torch's FSDP1 on this package, under ``fsdp.compat.patch()``.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp.compat import patch


def main(arguments: Sequence[str]) -> None:
    """Run the program; exit with 2 for an error in the arguments."""
    is_help = arguments[:1] in (["-h"], ["--help"])
    if is_help or not arguments or arguments == ["-m"]:
        print(__doc__, end="", file=sys.stdout if is_help else sys.stderr)
        sys.exit(0 if is_help else 2)
    if arguments[0] != "-m" and not Path(arguments[0]).exists():
        print(f"fsdp run: cannot open {arguments[0]}: there is no such file", file=sys.stderr)
        sys.exit(2)
    patch()
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
