#!/bin/bash
# Keys and values in 8 bits, and prefixes on disk, on one NVIDIA GPU: kernels first, then figures.
# About five minutes; each part ends by itself, with the servers that it has started.
#
#     PYTHON=python3 bash benchmarks/gpu/disk_and_bits.sh [tests] [bits] [disk] [large]
set -u
cd "$(dirname "$0")/../.." || exit
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/backend" HF_HUB_OFFLINE=1
python=${PYTHON:-python3}
parts=${*:-tests bits disk large}

part() { # NAME SECONDS COMMAND...: within the seconds, and interrupted after them
    local name=$1 seconds=$2
    shift 2
    [[ " $parts " == *" ${name%%,*} "* ]] || return 0
    echo "== $name ($(date +%X))"
    timeout --signal=INT --kill-after=30 "$seconds" "$@" 2>&1
    echo "== $name: $?"
}

checks() {
    "$python" - <<'CHECKS'
from mlx_manager.mlx_server.devices.attention.kinds import CODED

for case in CODED.cases():
    print(case.head_size, case.dtype, CODED.outcome(case.of) or "right", flush=True)
CHECKS
}
export -f checks
export python

part "tests, every shape of the kernels" 60 bash -c checks
cd backend || exit
part "tests, kernels" 60 "$python" -m pytest -q -x -p no:cacheprovider \
    tests/mlx_server/devices/attention/test_on_device.py -k 8_bits
part "tests, engines" 90 "$python" -m pytest -q -x -p no:cacheprovider \
    tests/mlx_server/engine/test_kv_in_8_bits.py tests/mlx_server/engine/disk
cd .. || exit
part "bits, of a 1B" 60 "$python" benchmarks/kv_bits.py --shape 1b --memory 30 --pages 2 \
    --rows 32 --prompt 512 --tokens 64 --crowd 240
part "disk, of a 1B" 90 "$python" benchmarks/disk_prefix.py --shape 1b --memory 30 --parts restart \
    --rounds 1
part "large, disk of an 8B" 150 "$python" benchmarks/disk_prefix.py --shape 8b --memory 60 --parts restart \
    --rounds 1
