#!/bin/sh
# Builds the environments of other people's clients, apart from kvd's own. Called by the Makefile:
# make_clients.sh PYTHON FOLDER. The clients of npm are left out where there is no npm; their tests then say so.
set -eu

python=$1
folder=$2
root=$(cd "$(dirname "$0")/.." && pwd)
environments=$root/tests/clients/environments

for name in general aider; do
    if [ ! -x "$folder/$name/bin/python" ]; then
        echo "kvd: making $folder/$name" >&2
        "$python" -m venv "$folder/$name"
    fi
    "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$environments/$name.txt"
done

if command -v npm >/dev/null 2>&1; then
    mkdir -p "$folder/node"
    cp "$environments/package.json" "$folder/node/"
    npm install --prefix "$folder/node" --no-audit --no-fund --loglevel=error
else
    echo "kvd: no npm here, so the clients of npm are left out; on Debian: apt-get install nodejs npm" >&2
fi
