"""The command ``python -m fsdp.plan``. The function ``fsdp.plan`` is another thing, in ``tools/plan.py``: this file is
never imported, since it would then stand in the function's place."""

import sys

from fsdp.tools.plan import main

if __name__ != "__main__":
    raise ImportError(
        "fsdp.plan is a function (from fsdp import plan) and a command (python -m fsdp.plan), not a module"
    )
sys.exit(main())
