#!/usr/bin/env bash
# On a GPU machine without network, make, git or a virtual environment: Python 3.12 and torch 2.11,
# and the wheels that `make hardware` has packed.  All files lie directly in $OUT.
set -u
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OUT="${OUT:-$(mktemp -d)}"
PYTHON=${PYTHON:-python3}
SITE=${SITE:-$(mktemp -d)}
{
    date
    uname -r
    nproc
    nvidia-smi
    "$PYTHON" -V
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$SITE" build/hardware/wheels/*.whl
} > "$OUT/machine.txt" 2>&1
# Behind what is installed there, in front of nothing that torch needs.
export PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -c "import pure_eval" || { echo "the wheels are not there: see $OUT/machine.txt"; exit 4; }
timeout --kill-after=10 "${HARD_S:-520}" "$PYTHON" tests/gpu/hour.py > "$OUT/log.txt" 2>&1
echo "hour.py ended with $?"
tail -n 40 "$OUT/summary.txt"
ls -l "$OUT"
count=$(find "$OUT" -mindepth 1 | wc -l)
[ "$count" -le 8 ] || { echo "$count files and folders in $OUT: at most 8 come back"; exit 5; }
