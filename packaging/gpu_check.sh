#!/bin/sh
# Checks and times kvd's GPU path on the card at hand: gpu_check.sh [--dry] [--only PART,…] [--seconds S]
# Runs from the source tree with nothing installed: it needs a Python with torch (2.11 or later), triton (3.6 or later) and
# numpy, which PYTHON names. Its parts have limits of 6 minutes together. Prints one table and writes gpu_check.json into $OUT, or here.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
exec "${PYTHON:-python3}" "$root/packaging/gpu_check.py" "$@"
