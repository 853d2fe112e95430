#!/usr/bin/env bash
# Trains a small GPT on this machine (examples/train_gpt.py), from nothing but a Python, and saves it; then continues from
# the checkpoint at another number of ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'EOF'
Usage: bash scripts/demo.sh [--steps N] [--strategy S] [--ranks R] [--trace] [--resume] [further options]

Trains a small GPT on the Python standard library's own sources, on all GPUs or, where there are none, in 2 CPU
processes. The first run makes the environment .venv and installs torch, numpy, tqdm and this package into it.
The training saves a checkpoint into .demo at its end. One process more, on GPUs one less, loads it, checks that the loss
on a held batch is what it was, and trains on for a tenth of the steps.

  --steps N      training steps (default 200: about a minute on 2 CPU cores)
  --strategy S   full_shard (default), shard_grad_op or no_shard
  --ranks R      processes; on GPUs at most one for each
  --trace        record a step of each training: step.svg, and trace.json for ui.perfetto.dev, in .demo-trace,
                 and in .demo-trace-resumed of the one that continues
  --resume       continue from the last checkpoint of the demo before: until --steps, or for a tenth more if it is there
  --help         print this

Further options go to the training script: --seed, --width, --depth, --heads, --context, --batch, --lr, --save-every.
EOF
}

fail() {
  echo "demo.sh: $1 (see bash scripts/demo.sh --help)" >&2
  exit 2
}

ranks=""
resume=""
trace=""
checkpoints=".demo"
arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --ranks) [ $# -gt 1 ] || fail "--ranks needs a number"; ranks=$2; shift 2 ;;
    --ranks=*) ranks=${1#--ranks=}; shift ;;
    --resume) resume=yes; shift ;;
    --trace) trace=.demo-trace; shift ;;
    *) arguments+=("$1"); shift ;;
  esac
done
[[ "$ranks" =~ ^([1-9][0-9]*)?$ ]] || fail "--ranks must be a number of at least 1, got '$ranks'"

[ -z "$resume" ] || [ -e "$checkpoints/latest" ] || fail "--resume finds no checkpoint in $checkpoints"
arguments+=(--save "$checkpoints")

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
' "${arguments[@]}")
if [ "$devices" -gt 0 ] && [ "${ranks:-1}" -gt "$devices" ]; then
  fail "--ranks $ranks needs a GPU for each process, found $devices"
fi
[ -n "$ranks" ] || { [ "$devices" -gt 0 ] && ranks=$devices || ranks=2; }

# torchrun would warn that it sets this; the training script shares the cores among the processes itself.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
train_on() {
  "$python" -m torch.distributed.run --standalone --nproc-per-node "$1" examples/train_gpt.py "${@:2}" \
    ${trace:+--trace "$trace"} "${arguments[@]}"
}

if [ -z "$resume" ]; then
  rm -rf "$checkpoints"
  train_on "$ranks"
  before=$ranks
  if [ "$devices" -eq 0 ]; then
    ranks=$((ranks + 1))
  elif [ "$ranks" -gt 1 ]; then
    ranks=$((ranks - 1))
  fi
  trace=${trace:+$trace-resumed}
  printf '\nNow with --resume, in %s instead of %s processes\n' "$ranks" "$before"
fi
train_on "$ranks" --resume "$checkpoints"
