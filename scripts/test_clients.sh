#!/usr/bin/env bash
# Runs accelerate, Lightning, transformers, peft, bitsandbytes, trl, verl and Composer on this package and on torch's FSDP1
# with the same programs, on 2 CPU ranks, and compares; see clients.py. The tools are installed into .venv-clients, at the
# first run.
#
#   test_clients.sh                     every row
#   test_clients.sh --only accelerate   those whose words contain that; --list shows them
#   test_clients.sh --without-fsdp1     this package's half where torch has no FSDP1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
ensure_env clients
exec "$python" scripts/clients.py "$@"
