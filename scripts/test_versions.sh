#!/usr/bin/env bash
# Runs the tests with other versions of torch, each in an environment .venv-torch-VERSION, which is made at the first run.
#
#   test_versions.sh 2.6.0 2.9.1                              everything, with each
#   test_versions.sh 2.6.0 -- tests/test_parity.py -x         what follows goes to one plain pytest
#
# Wheels of torch for CUDA take several GB, with what they need. Fails if a test fails with any of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

versions=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  versions+=("$1")
  shift
done
[ ${#versions[@]} -gt 0 ] || { echo "usage: bash scripts/test_versions.sh VERSION ... [-- PYTEST ARGUMENTS]" >&2; exit 2; }
tests=("${@:2}") # after --

failed=()
for version in "${versions[@]}"; do
  ensure_env "torch-$version"
  echo "== torch $version, $("$python" --version)"
  if [ ${#tests[@]} -gt 0 ]; then
    "$python" -m pytest "${tests[@]}" || failed+=("$version")
  else
    bash scripts/side_by_side.sh "$python" || failed+=("$version")
  fi
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with torch ${failed[*]}" >&2; exit 1; }
