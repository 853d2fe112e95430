#!/usr/bin/env bash
# Runs the numeric tests once for every instruction set that torch's kernels and MKL's can be held to, as far as this
# processor has it: bounds must not depend on how a processor's kernels add up. Takes long; arguments replace the files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/env.sh
ensure_env test
files=("$@")
if [ ${#files[@]} -eq 0 ]; then
  files=(tests/test_{harness,parity,reliability_numerics,precision,precision_casts,precision_values,accumulation}.py)
  files+=(tests/test_backward*.py tests/test_{reduce_unused,comm_hooks,clip,grad_scaler,stages}.py)
fi

has() { [ ! -r /proc/cpuinfo ] || grep -qw -m1 "$1" /proc/cpuinfo; }

failed=()
for mkl in SSE4_2 AVX2 AVX512; do
  for aten in default avx2 avx512; do
    name="MKL_ENABLE_INSTRUCTIONS=$mkl ATEN_CPU_CAPABILITY=$aten"
    if { [[ "${mkl,,} $aten" == *avx512* ]] && ! has avx512f; } || { [[ "${mkl,,} $aten" == *avx2* ]] && ! has avx2; }; then
      echo "== $name: not on this processor"
      continue
    fi
    echo "== $name"
    env MKL_ENABLE_INSTRUCTIONS="$mkl" ATEN_CPU_CAPABILITY="$aten" \
      "$python" scripts/run_tests.py --no-types "${files[@]}" || failed+=("$name")
  done
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed with %s\n' "${failed[@]}"
  exit 1
fi
echo "the numeric tests pass with every instruction set of this processor"
