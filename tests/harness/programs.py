"""Python programs in forks of a process that has imported torch alone, which takes a new interpreter a second.

Run as `python -m tests.harness.programs` by `run_python`.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.harness.template import Request, Template, serve_imported

REPOSITORY = Path(__file__).resolve().parents[2]


@cache
def _template() -> Template:
    alone = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    template = Template(["-m", __name__], {**os.environ, **alone})
    atexit.register(template.close)
    return template


def run_python(*arguments: str, folder: Path, warn: str = "ignore") -> tuple[int, str]:
    """Run the file `arguments[0]` of `folder`, or a module after "-m", like `python -W warn`.

    Return the exit code and the output with that of stderr. The repository's packages can be imported.
    """
    path = [str(folder), str(REPOSITORY), *sys.path]
    request = Request((warn, *arguments), dict(os.environ), path, str(folder))
    with tempfile.TemporaryFile() as output:
        process = _template().fork(request, [], output.fileno())
        try:
            code = process.wait(timeout=120)
        finally:
            process.kill()
            process.close()
        output.seek(0)
        return code, output.read().decode()


def run_as_main(arguments: Sequence[str]) -> None:
    """Run a file, or a module after "-m", in this process."""
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def main() -> None:
    request, _ = serve_imported(["torch"])
    warn, *arguments = request.arguments
    sys.warnoptions[:] = [warn]
    warnings.simplefilter(warn)  # type: ignore[arg-type]
    run_as_main(arguments)


if __name__ == "__main__":
    main()
