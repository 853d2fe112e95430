#!/usr/bin/env bash
# Checks the sources and runs the test suite, in .venv (made at the first run).
#
#   test.sh                        everything: linters, then tests in three processes, with the type checker beside them
#   test.sh -x                     the same, but it ends at the first failure
#   test.sh --quick                a choice of the tests that takes about a minute
#   test.sh --with-libraries ...   installs transformers and peft first, so that tests/test_libraries.py runs
#   test.sh ANYTHING ELSE          goes to one plain pytest: test.sh tests/test_layout.py -k gaps
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=test
if [ "${1:-}" = --with-libraries ]; then
  kind=libraries
  shift
fi
source scripts/env.sh
ensure_env "$kind"
case "$*" in
  "" | -x | --quick | "--quick -x" | "-x --quick")
    bash scripts/lint.sh --no-types
    exec "$python" scripts/run_tests.py "$@"
    ;;
  *)
    bash scripts/lint.sh
    exec "$python" -m pytest "$@"
    ;;
esac
