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
quick=(architecture api layout members wrap wrapper ownership errors optim_state state_dict consensus nested ragged names)
case "$*" in
  "" | -x | --quick | "--quick -x" | "-x --quick")
    bash scripts/lint.sh --no-types
    files=() options=()
    [[ "$*" != *--quick* ]] || files=("${quick[@]/%/.py}") # those that most mistakes break first
    [[ "$*" != *-x* ]] || options=(-x)
    "$python" -m mypy &
    types=$! status=0
    bash scripts/side_by_side.sh "$python" ${options[@]+"${options[@]}"} ${files[@]+"${files[@]/#/tests/test_}"} || status=1
    wait "$types" || { echo "mypy has found errors" >&2; status=1; }
    exit "$status"
    ;;
  *)
    bash scripts/lint.sh
    exec "$python" -m pytest "$@"
    ;;
esac
