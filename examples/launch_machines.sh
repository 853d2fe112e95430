#!/usr/bin/env bash
# One training on several machines: the same command on each of them, which meet at the first one.
#
#   bash examples/launch_machines.sh MACHINES RANKS_PER_MACHINE FIRST_MACHINE SCRIPT [ARGUMENT ...]
#   bash examples/launch_machines.sh 2 8 node0.cluster examples/hybrid.py --steps 100 --save /shared/checkpoints
#
# FIRST_MACHINE is a name or address under which all of them reach one of them, whose port 29400 (or PORT) is free. Run
# it within 10 minutes on all; each waits for the others. Checkpoints need a directory that every machine sees. Under a
# scheduler it is the command of each task: srun --nodes 2 --ntasks-per-node 1 bash examples/launch_machines.sh ...
set -euo pipefail
if [ $# -lt 4 ]; then
  sed -n '2,/^set/p' "$0" | grep '^#' | cut -c3- >&2
  exit 2
fi
machines=$1 ranks=$2 first=$3
shift 3
exec torchrun --nnodes "$machines" --nproc-per-node "$ranks" --max-restarts "${RESTARTS:-0}" \
  --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29400}" --rdzv-id "${JOB:-fsdp}" "$@"
