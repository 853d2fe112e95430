#!/usr/bin/env bash
# Runs test files in three pytest processes side by side, since most of the suite's time is waiting: ranks wait for each
# other. Tests marked `serial` run last, alone. Prints what each process printed, and the totals last.
#
#   side_by_side.sh PYTHON [PYTEST OPTION ...] [FILE ...]      (default: all files)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$1 options=() files=()
for argument in "${@:2}"; do
  case "$argument" in
    -*) options+=("$argument") ;;
    *) files+=("$argument") ;;
  esac
done
[ ${#files[@]} -gt 0 ] || files=(tests/test_*.py)

logs=$(mktemp -d) status=0
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT
run() { # NUMBER FILE ...: 5, "no tests ran", is no failure of one part
  local code=0
  "$python" -m pytest -q -ra ${options[@]+"${options[@]}"} "${@:2}" >"$logs/$1" 2>&1 || code=$?
  [ "$code" -eq 5 ] || return "$code"
}

parts=()
for number in 0 1 2; do
  mine=()
  for ((i = number; i < ${#files[@]}; i += 3)); do mine+=("${files[i]}"); done
  [ ${#mine[@]} -gt 0 ] || continue
  run "$number" -m "not serial" "${mine[@]}" &
  parts+=("$!")
done
for number in "${!parts[@]}"; do
  wait "${parts[number]}" || status=1
  cat "$logs/$number"
done
if [ "$status" -eq 0 ] || [[ " ${options[*]-} " != *" -x "* ]]; then
  run 3 -m serial "${files[@]}" || status=1
  cat "$logs/3"
fi

total() { sed -nE "s/^(.*[^0-9])?([0-9]+) $1.* in [0-9.]+s.*/\2/p" "$logs"/* | awk '{ n += $1 } END { print n + 0 }'; }
passed=$(total passed)
echo "$passed passed, $(($(total failed) + $(total error))) failed, $(total skipped) skipped"
[ "$passed" -gt 0 ] || { echo "no test passed: nothing has been shown"; status=1; }
exit "$status"
