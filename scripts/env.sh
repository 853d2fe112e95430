# Sourced by the other scripts: `ensure_env demo`, `ensure_env test` or `ensure_env libraries` (test, and what others
# wrote for it to be tested with) makes .venv at the repository root, `ensure_env clients` (the tools that
# test_clients.sh runs) makes .venv-clients, `ensure_env torch-VERSION` .venv-torch-VERSION, with what that kind needs, and
# sets `python` to its interpreter. It installs only when something is missing, so later runs need no network.
# PYTHON=/path/to/python3 chooses the interpreter that the environment is made from.
# shellcheck shell=bash

_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
_torch="torch==2.13.0" # what the package is tested with; setup.py says what it allows

_suitable() {
  "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 </dev/null
}

_find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python3.14 python; do
    if command -v "$candidate" >/dev/null 2>&1 && _suitable "$candidate"; then
      echo "$candidate"
      return
    fi
    if [ -n "${PYTHON:-}" ]; then
      break
    fi
  done
  local found
  found=$("${PYTHON:-python3}" --version 2>&1) || found="no ${PYTHON:-python3}"
  echo "error: Python 3.10 or later with its venv module is needed (found: $found)." >&2
  echo "       Install it (on Debian and Ubuntu: apt install python3 python3-venv), or set PYTHON to its path." >&2
  return 1
}

ensure_env() {
  local kind=$1 extras torch=$_torch venv="$_root/.venv" stamp wanted base
  case "$kind" in
    demo) extras="" ;;
    test) extras="test,dev" ;;
    libraries) extras="test,dev,libraries" ;;
    clients) extras="clients" venv="$_root/.venv-clients" ;;
    torch-*) extras="test" torch="torch==${kind#torch-}" venv="$_root/.venv-$kind" ;;
    *) echo "error: ensure_env takes demo, test, libraries, clients or torch-VERSION, got '$kind'" >&2; return 1 ;;
  esac
  python="$venv/bin/python"
  stamp="$venv/.installed-$kind"
  # The path is part of it since an environment that was moved or copied does not work.
  wanted="$torch [$extras] $venv $(cksum <"$_root/setup.py")"
  if [ -x "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return
  fi
  if ! { [ -x "$python" ] && _suitable "$python"; }; then
    base=$(_find_python) || return 1
    echo "Making ${venv##*/} with $("$base" --version)" >&2
    "$base" -m venv --clear "$venv"
  fi
  echo "Installing $torch and the packages that '$kind' needs into ${venv##*/} (once)" >&2
  # The build runs in there (--no-build-isolation): an isolated one would download setuptools again at every change.
  local pip=("$python" -m pip --disable-pip-version-check --no-input install --quiet)
  "${pip[@]}" "setuptools>=77" </dev/null
  "${pip[@]}" --no-build-isolation "$torch" -e "$_root${extras:+[$extras]}" </dev/null
  if [ "$kind" = clients ]; then
    # Composer asks for an older torch, and for torchvision: clients.py does without these, and without Composer.
    { "${pip[@]}" coolname tabulate py-cpuinfo requests torch_optimizer "importlib-metadata<9" "pillow<12" </dev/null &&
      "${pip[@]}" --no-deps mosaicml==0.32.1 </dev/null; } || echo "Composer cannot be installed: without its rows" >&2
    # verl asks for older releases of transformers and tensordict.
    local needed=(cloudpickle codetiming jsonschema msgpack omegaconf orjson pillow protobuf pyvers requests torchdata wandb)
    local alone=(antlr4-python3-runtime==4.9.3 hydra-core pybind11 pylatexenc ray tensordict verl==0.9.1)
    { "${pip[@]}" "${needed[@]}" </dev/null && "${pip[@]}" --no-deps "${alone[@]}" </dev/null; } ||
      echo "verl cannot be installed: without its rows" >&2
  fi
  echo "$wanted" >"$stamp.part"
  mv "$stamp.part" "$stamp"
}
