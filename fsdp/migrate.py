"""The command ``python -m fsdp.migrate script.py``."""

import sys

from fsdp.tools.migrate import main

if __name__ == "__main__":
    sys.exit(main())
