#!/usr/bin/env bash
# Runs the numeric tests once for every instruction set that torch's kernels and MKL's can be held to, as far as this
# processor has it: bounds must not depend on how a processor's kernels add up. A last run puts every leaf at an odd offset
# of its full buffer, where no vector register is aligned; it leaves out files that state offsets. Takes long; arguments
# replace the files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/env.sh
ensure_env test
files=("$@") with_offsets=()
if [ ${#files[@]} -eq 0 ]; then
  files=(tests/test_{parity,reliability_numerics,precision,precision_values,accumulation,reduce_unused,grad_scaler}.py)
  files+=(tests/test_backward*.py)
  with_offsets=(tests/test_{harness,precision_casts,comm_hooks,clip,stages}.py)
fi

has() { [ ! -r /proc/cpuinfo ] || grep -qw -m1 "$1" /proc/cpuinfo; }

failed=()
run_with() {
  echo "== $*"
  if { [[ "${*,,}" == *avx512* ]] && ! has avx512f; } || { [[ "${*,,}" == *avx2* ]] && ! has avx2; }; then
    echo "not on this processor"
  else
    env "$@" bash scripts/side_by_side.sh "$python" "${files[@]}" ${with_offsets[@]+"${with_offsets[@]}"} ||
      failed+=("$*")
  fi
}

for mkl in COMPATIBLE AVX2,STRICT AVX512,STRICT; do
  for aten in default avx2 avx512; do
    run_with MKL_CBWR="$mkl" ATEN_CPU_CAPABILITY="$aten"
  done
done
with_offsets=()
run_with LEAVES_AT_ODD_OFFSETS=1
if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed with %s\n' "${failed[@]}"
  exit 1
fi
echo "the numeric tests pass with every instruction set of this processor"
