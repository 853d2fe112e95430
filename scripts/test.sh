#!/usr/bin/env bash
# Checks the sources, then runs the test suite, in .venv (made at the first run). Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/env.sh
ensure_env test
bash scripts/lint.sh
exec "$python" -m pytest "$@"
