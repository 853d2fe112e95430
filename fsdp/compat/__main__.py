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
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        sys.exit(__doc__)
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
