#!/usr/bin/env bash
# Linter, formatter and type checker over the whole repository, as pyproject.toml configures them. Fails at a violation.
# With --no-types it leaves out the type checker, which takes longest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/env.sh
ensure_env test
"$python" -m ruff check .
"$python" -m ruff format --check --quiet .
[ "${1:-}" = --no-types ] || "$python" -m mypy
