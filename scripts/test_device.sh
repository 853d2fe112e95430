#!/usr/bin/env bash
# Builds the late device of tests/device and runs the trainings on it: parity, situations, hybrid, and the checks for GPUs.
# Takes about ten minutes on two idle cores, needs a C++ compiler, and exits with 1 if a case failed.
#
#   test_device.sh                      everything
#   test_device.sh situations fail      the cases of one file whose names contain one of the words
#
# LAG_SEED=5 draws other delays, LAG_ALONE=1 leaves out gloo for CPU tensors.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/env.sh
ensure_env test
"$python" -c 'import ninja' 2>/dev/null ||
  "$python" -m pip --disable-pip-version-check --no-input install --quiet ninja </dev/null
PATH="$(dirname "$python"):$PATH" # where ninja is
export PATH OMP_NUM_THREADS=1

if [ $# -gt 0 ]; then
  exec "$python" -m "tests.device.$1" "${@:2}"
fi
"$python" -m tests.device.smoke
failed=()
for file in parity situations hybrid gpu_scripts; do
  "$python" -m "tests.device.$file" || failed+=("$file")
done
[ ${#failed[@]} -eq 0 ] || { echo "test_device.sh: failed: ${failed[*]}" >&2; exit 1; }
