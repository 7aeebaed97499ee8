#!/bin/sh
# Builds or completes the virtual environment. Called by the Makefile: make_venv.sh PYTHON VENV [EXTRA]
# EXTRA is an optional set of dependencies in pyproject.toml: test or dev. KVD_TORCH names the torch to install, as pip
# writes it: a requirement ("torch==2.12.*") or the path of a wheel.
set -eu

python=$1
venv=$2
extra=${3:-}
root=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    echo "kvd: $*" >&2
    exit 1
}

check_python() {
    command -v "$python" >/dev/null 2>&1 ||
        fail "no $python here; on Debian: apt-get install python3 python3-venv (or: make PYTHON=/path/to/python3.11)"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$("$python" --version 2>&1) is too old: kvd needs 3.11 or newer; choose one with make PYTHON=python3.12"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python lacks its venv module; on Debian: apt-get install python3-venv"
}

check_compiler() {
    for compiler in "${CXX:-}" c++ g++ clang++; do
        if [ -n "$compiler" ] && command -v "$compiler" >/dev/null 2>&1; then
            return
        fi
    done
    echo "kvd: no C++ compiler here, so kvd will run on its slow reference kernels; on Debian: apt-get install g++" >&2
}

announce_download() {
    if [ -n "${KVD_TORCH:-}" ] || "$venv/bin/python" -c 'import torch' 2>/dev/null; then
        return
    fi
    if [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ]; then
        echo "kvd: installing the dependencies. No NVIDIA device is here, but where pip finds no CPU build of torch it" \
            "downloads the CUDA build, several GB. To use another one: make KVD_TORCH=/path/to/torch-wheel-or-requirement" >&2
    else
        echo "kvd: installing the dependencies; torch with CUDA is a download of several GB" >&2
    fi
}

check_python
check_compiler
if [ ! -x "$venv/bin/python" ]; then
    echo "kvd: making $venv with $("$python" --version 2>&1)" >&2
    "$python" -m venv "$venv"
fi
announce_download
target=$root
if [ -n "$extra" ]; then
    target="$root[$extra]"
fi
if [ -n "${KVD_TORCH:-}" ]; then
    "$venv/bin/python" -m pip install --disable-pip-version-check "$KVD_TORCH" --editable "$target"
else
    "$venv/bin/python" -m pip install --disable-pip-version-check --constraint "$root/packaging/constraints.txt" \
        --editable "$target"
fi
