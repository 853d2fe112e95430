#!/usr/bin/env bash
# Trains a small GPT on this machine (examples/train_gpt.py), from nothing but a Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'EOF'
Usage: bash scripts/demo.sh [--steps N] [--strategy S] [--ranks R] [further options]

Trains a small GPT on the Python standard library's own sources, on all GPUs or, where there are none, in 2 CPU
processes. The first run makes the environment .venv and installs torch, numpy, tqdm and this package into it.

  --steps N      training steps (default 400: one to two minutes on 2 CPU cores)
  --strategy S   full_shard (default), shard_grad_op or no_shard
  --ranks R      processes; on GPUs at most one for each
  --help         print this

Further options go to the training script: --seed, --width, --depth, --heads, --context, --batch, --lr.
EOF
}

fail() {
  echo "demo.sh: $1 (see bash scripts/demo.sh --help)" >&2
  exit 2
}

ranks=""
arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --ranks) [ $# -gt 1 ] || fail "--ranks needs a number"; ranks=$2; shift 2 ;;
    --ranks=*) ranks=${1#--ranks=}; shift ;;
    *) arguments+=("$1"); shift ;;
  esac
done
[[ "$ranks" =~ ^([1-9][0-9]*)?$ ]] || fail "--ranks must be a number of at least 1, got '$ranks'"

source scripts/env.sh
ensure_env demo

# One process checks the options before several are started; it prints how many accelerators there are.
devices=$("$python" -c '
import sys
sys.argv[0] = "demo.sh"
sys.path.insert(0, "examples")
import torch, train_gpt
train_gpt.parse_arguments()
print(torch.accelerator.device_count() if train_gpt.accelerator() else 0)
' ${arguments[@]+"${arguments[@]}"})
if [ "$devices" -gt 0 ] && [ "${ranks:-1}" -gt "$devices" ]; then
  fail "--ranks $ranks needs a GPU for each process, found $devices"
fi
[ -n "$ranks" ] || { [ "$devices" -gt 0 ] && ranks=$devices || ranks=2; }

# torchrun would warn that it sets this; the training script shares the cores among the processes itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" examples/train_gpt.py \
  ${arguments[@]+"${arguments[@]}"}
