#!/usr/bin/env bash
# Installs cavectl for this user, from this folder.
#
#   ./install.sh                    install: environment, package, default model, launcher
#   ./install.sh run "a question"   install what is missing, then: cavectl run "a question"
#   ./install.sh --no-model         install without the default model
#   ./install.sh --with-torch       bring torch and triton too, at once or to what is installed already
#   ./install.sh --no-torch         leave them out, here and in later runs, even with an NVIDIA GPU
#   ./install.sh --uninstall        remove what this script made, nothing else
#
# Without either, torch and triton come where there is an NVIDIA GPU, and come last: cavectl answers on the CPU without them.
# No root. Made: $XDG_DATA_HOME/cavectl (~/.local/share/cavectl) and ~/.local/bin/cavectl. Messages go to stderr.
{ # one block: a download that is cut short runs nothing
set -euo pipefail

main() {
  local source data venv bin receipt model=smollm2:135m want_model=1 torch="" gpu=""
  source=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  unset PYTHONPATH PYTHONHOME # what is installed must not depend on them
  data=${CAVECTL_DATA_DIR:-${XDG_DATA_HOME:-${HOME:?HOME is not set}/.local/share}/cavectl}
  venv=$data/venv
  bin=${HOME:?HOME is not set}/.local/bin
  receipt=$data/install-receipt

  say() { printf '%s\n' "$*" >&2; }
  fail() {
    printf 'error: %s\n' "$1" >&2
    [ -n "${2:-}" ] && printf 'hint: %s\n' "$2" >&2
    exit "${3:-1}"
  }

  find_python() {
    local candidate
    for candidate in ${CAVECTL_PYTHON:-} python3 python3.13 python3.12 python3.11; do
      if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' 2>/dev/null; then
        command -v "$candidate"
        return
      fi
    done
    fail "no Python 3.11 or newer was found" "install one (on Debian: apt-get install python3 python3-venv), or name it: CAVECTL_PYTHON=/path/to/python3 ./install.sh"
  }

  # What the environment was made from: sources, versions, interpreter. Equal means nothing to do.
  fingerprint() {
    (cd "$source" && find cavectl daemon engine pyproject.toml constraints.txt -type f ! -name '*.pyc' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum && "$1" -VV) |
      sha256sum | cut -c1-64
  }

  detect_gpu() {
    if command -v nvidia-smi >/dev/null 2>&1; then
      gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1) || gpu=""
    fi
  }

  say_gpu() {
    if [ -n "$gpu" ]; then say "NVIDIA GPU: $gpu (driver left as it is)"; else say "NVIDIA GPU: none found, running on the CPU"; fi
  }

  # Whether torch and triton are to be there: the word given now, else the one given before ($venv/.torch), else as the GPU says.
  decide_torch() {
    local before
    before=$(cat "$venv/.torch" 2>/dev/null) || before=""
    [ "$torch" != no ] && [ "$before" != installed ] && detect_gpu
    if [ -n "$torch" ]; then return; fi
    case $before in
      installed) torch=yes ;;
      left-out) torch=no ;;
      *) if [ -n "$gpu" ]; then torch=yes; fi ;;
    esac
  }

  # What pyproject.toml asks for, a line each: `torch` gives torch and triton, `rest` all the others.
  requirements() { # python, part
    "$1" -I - "$source/pyproject.toml" "$2" <<'PY'
import re, sys, tomllib
with open(sys.argv[1], "rb") as file:
    wanted = tomllib.load(file)["project"]["dependencies"]
for line in wanted:
    if (re.match(r"[\w.-]+", line)[0] in ("torch", "triton")) == (sys.argv[2] == "torch"):
        print(line)
PY
  }

  pip_install() { # python, arguments
    local python=$1
    shift
    "$python" -I -m pip install --disable-pip-version-check --no-input -c "$source/constraints.txt" "$@" 1>&2
  }

  note() { grep -qxF -- "$1" "$receipt" 2>/dev/null || printf '%s\n' "$1" >>"$receipt"; }

  # Makes a folder and those above it, and notes each one that was not there, outermost first.
  make_folder() {
    local folder=$1 missing=()
    while [ ! -d "$folder" ]; do
      missing=("$folder" "${missing[@]}")
      folder=$(dirname "$folder")
    done
    [ ${#missing[@]} = 0 ] && return
    mkdir -p "$1"
    (umask 077 && mkdir -p "$data")
    for folder in "${missing[@]}"; do note "dir $folder"; done
  }

  make_environment() { # python, fingerprint
    local fresh=$data/venv.new
    say "making the environment in $venv"
    rm -rf "$fresh"
    "$1" -m venv "$fresh" >&2 || fail "the virtual environment could not be made" "on Debian: apt-get install python3-venv"
    say "installing cavectl and its libraries (a minute or two the first time)"
    requirements "$fresh/bin/python" rest >"$fresh/requirements.txt"
    pip_install "$fresh/bin/python" -r "$fresh/requirements.txt" && pip_install "$fresh/bin/python" --no-deps "$source" ||
      fail "the libraries could not be installed" "see the lines above; a second ./install.sh goes on from what was downloaded" 7
    stop_daemon
    rm -rf "$venv"
    mv "$fresh" "$venv"
    # The entry point again, for the folder's final name: through sh, since a folder with a space cannot stand after `#!`, and
    # isolated (-I), so that no PYTHONPATH or working folder decides what is imported.
    printf "#!/bin/sh\nexec '%s' -I -m cavectl \"\$@\"\n" "${venv//\'/\'\\\'\'}/bin/python" >"$venv/bin/cavectl"
    chmod 755 "$venv/bin/cavectl"
    printf '%s\n' "$2" >"$venv/.fingerprint"
  }

  make_launcher() {
    if [ -L "$bin/cavectl" ] && [ "$(readlink "$bin/cavectl")" = "$venv/bin/cavectl" ]; then return; fi
    if [ -e "$bin/cavectl" ] || [ -L "$bin/cavectl" ]; then
      fail "$bin/cavectl exists and was not made by this script" "move it away and run ./install.sh again; the program itself is $venv/bin/cavectl"
    fi
    make_folder "$bin"
    ln -s "$venv/bin/cavectl" "$bin/cavectl"
    note "launcher $bin/cavectl"
    case ":$PATH:" in *":$bin:"*) ;; *) say "note: $bin is not in your PATH; add it, or call $bin/cavectl" ;; esac
  }

  stop_daemon() {
    if [ -x "$venv/bin/cavectl" ]; then "$venv/bin/cavectl" daemon stop >/dev/null 2>&1 || true; fi
  }

  torch_is_due() { [ "$torch" = yes ] && [ "$(cat "$venv/.torch" 2>/dev/null)" != installed ]; }

  install_torch() {
    torch_is_due || return 0
    say "installing torch and triton (gigabytes where there is a GPU)"
    requirements "$venv/bin/python" torch >"$venv/requirements.txt"
    pip_install "$venv/bin/python" -r "$venv/requirements.txt" ||
      fail "torch could not be installed; what is installed works without it on the CPU" "see the lines above; then ./install.sh --with-torch" 7
    echo installed >"$venv/.torch"
  }

  # Torch first where nothing else could run a model: the native backend is not there, for want of a C++ compiler.
  check_native() {
    local why
    if [ "$(cat "$venv/.torch" 2>/dev/null)" = installed ]; then return; fi
    if why=$("$venv/bin/python" -I - <<'PY'
import sys
from engine.kernels.cpu.lib import NativeUnavailable, load
try:
    load()
except NativeUnavailable as error:
    sys.exit(print(error.message) or 1)
PY
    ); then return; fi
    if [ "$torch" = no ]; then
      say "note: $why; torch was left out too, so no model can run (./install.sh --with-torch brings it)"
    else
      say "note: $why; torch is installed to run models in its place, slowly"
      torch=yes
      install_torch
    fi
  }

  install_all() {
    local python want
    python=$(find_python)
    want=$(fingerprint "$python")
    decide_torch
    if [ "$(cat "$venv/.fingerprint" 2>/dev/null)" != "$want" ]; then
      say_gpu
      make_folder "$(dirname "$data")"
      (umask 077 && mkdir -p "$data")
      make_environment "$python" "$want"
    fi
    if [ "$torch" = no ] && [ ! -e "$venv/.torch" ]; then echo left-out >"$venv/.torch"; fi
    check_native
    make_launcher
    if [ "$want_model" = 1 ] && ! "$venv/bin/cavectl" show "$model" >/dev/null 2>&1; then
      say "fetching the default model, $model"
      "$venv/bin/cavectl" pull "$model" 1>&2 || exit $?
      note "model $model"
    fi
  }

  # The answer comes first, torch after it; a person who stopped the answer wants no more.
  answer() {
    local code=0
    if [ $# -gt 0 ]; then
      torch_is_due || exec "$venv/bin/cavectl" "$@"
      "$venv/bin/cavectl" "$@" || code=$?
      case $code in 130 | 143) return "$code" ;; esac
    else
      say "ready: cavectl run \"Why is the sky blue?\""
    fi
    install_torch
    return "$code"
  }

  uninstall() {
    local kind what made built
    [ -e "$receipt" ] || [ -d "$venv" ] || { say "nothing to remove: cavectl is not installed in $data"; return; }
    [ ! -e "$receipt" ] || while read -r kind what; do
      [ "$kind" = model ] && [ -x "$venv/bin/cavectl" ] && "$venv/bin/cavectl" rm "$what" >/dev/null 2>&1 || true
    done <"$receipt"
    stop_daemon
    if [ -L "$bin/cavectl" ] && [ "$(readlink "$bin/cavectl")" = "$venv/bin/cavectl" ]; then rm -f "$bin/cavectl"; fi
    rm -rf "$venv" "$data/venv.new" "$data/logs" "$data/run" "$data/model-names" ${XDG_RUNTIME_DIR:+"$XDG_RUNTIME_DIR/cavectl"}
    built=${XDG_CACHE_HOME:-$HOME/.cache}/cavectl # what was compiled on first use, where the package came without it
    rm -rf "$built"/native-*
    rmdir "$built" 2>/dev/null || true
    made=$(sed -n 's/^dir //p' "$receipt" 2>/dev/null | tac)
    rm -f "$receipt"
    find "$data" -mindepth 1 -type d -empty -delete 2>/dev/null || true
    rmdir "$data" 2>/dev/null || true
    while read -r what; do
      if [ -n "$what" ]; then rmdir "$what" 2>/dev/null || true; fi
    done <<<"$made"
    if [ -d "$data" ]; then
      say "removed; kept in $data what you added: $(cd "$data" && ls -A | tr '\n' ' ')(rm -r that folder to remove it too)"
    else
      say "removed"
    fi
  }

  [ "$(id -u)" != 0 ] || [ "${HOME}" != / ] || fail "HOME is /" "set HOME to your home folder"
  [ "$(uname -s)" = Linux ] || fail "this script is for Linux" "on Windows, use WSL"
  while [ $# -gt 0 ]; do
    case $1 in
      --uninstall) uninstall; return ;;
      --no-model) want_model=0 ;;
      --with-torch) torch=yes ;;
      --no-torch) torch=no ;;
      -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$source/install.sh"; return ;;
      -*) fail "unknown option $1" "./install.sh --help" 2 ;;
      *) break ;;
    esac
    shift
  done
  install_all
  answer "$@"
}

main "$@"
exit
}
