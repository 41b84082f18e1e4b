#!/usr/bin/env bash
# Everything that needs a GPU, in one go of at most 8 minutes: builds from this checkout, tests the kernels, measures,
# tests shards and workers, and runs a selection under compute-sanitizer. What is worth most comes first, and all of it
# is on disk as it comes: who is cut off has what was done until then.
#
#   bench/on_gpu.sh [--dry-run] [--only STEP,STEP] [--wheels FOLDER] [RESULTS]
#
#   RESULTS          where to: $OUT, or build/on_gpu/results: summary.txt, log.txt, GPU.json and GPU.png
#   --dry-run        on a machine without a GPU: builds, loads the extension, collects the tests, and stops there
#   --only STEPS     of kernels, bench, stores, memcheck and racecheck, these: for a second look, after the first build
#   --wheels FOLDER  wheels of packages that the machine lacks, or has too old; msgspec, say, without which there is no
#                    store. One of psstore itself, built from this checkout with -C cmake.define.PSSTORE_CUDA=on, saves
#                    the build
#
# It uses no network and installs into build/on_gpu alone. What the machine's Python has to have: torch, numpy, pip,
# pybind11 >= 3, scikit-build-core >= 0.11, CMake >= 3.26, ninja, pytest, and nvcc >= 12 on the PATH or in
# /usr/local/cuda. Where msgspec, psutil or hypothesis is missing the kernels are still tested and measured, and the
# summary says what was left out. On a machine that has a network, wheels for one that has none are fetched by
#
#   pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 -d FOLDER msgspec
#
# Each step has a time limit of its own, and its failure does not keep the later ones from running. Exits with 0 if
# all passed, 1 if one failed, 2 if there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."

dry_run=
only=
wheels=
results=${OUT:-build/on_gpu/results}
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry_run=1 ;;
        --only)
            only=,${2:?--only needs names of steps}, && shift
            for name in ${only//,/ }; do
                case $name in
                    kernels | bench | stores | memcheck | racecheck) ;;
                    *) echo "there is no step $name" >&2 && exit 64 ;;
                esac
            done
            ;;
        --wheels) wheels=$(realpath -- "${2:?--wheels needs a folder}") && shift ;;
        -*) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" | sed '/^set /d' && exit 64 ;;
        *) results=$1 ;;
    esac
    shift
done
mkdir -p "$results" && results=$(realpath -- "$results")

TOTAL_S=470 BUILD_S=240 # of the 8 minutes
if [ -n "$dry_run" ]; then TOTAL_S=1800 BUILD_S=1500; fi # nothing is in a hurry
readonly TOTAL_S BUILD_S
readonly SITE=$PWD/build/on_gpu/site TREE=$PWD/build/on_gpu/tree
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$SITE PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# CMake and ninja may be this Python's packages, and nvcc beside its libraries alone.
PATH=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
command -v nvcc >/dev/null || PATH=$PATH:/usr/local/cuda/bin
export PATH

summary=$results/summary.txt log=$results/log.txt
: >"$summary" >"$log"
say() { printf '%s\n' "$*" | tee -a "$summary"; }

failed=0
# step NAME LIMIT_S COMMAND...: its output goes to the log, and the end of it to the terminal.
step() {
    local name=$1 limit=$2 begin=$SECONDS left status
    shift 2
    if [ -n "$only" ] && [ "$name" != build ] && [[ $only != *",$name,"* ]]; then return 0; fi
    left=$((TOTAL_S - SECONDS))
    if [ "$left" -lt 10 ]; then
        say "$name: NOT RUN: no time left"
        failed=1
        return 1
    fi
    printf '\n== %s\n' "$name" | tee -a "$log"
    # SIGINT first: pytest then tells what it was doing, and the bench what it has measured.
    timeout --signal=INT --kill-after=10 $((limit < left ? limit : left)) "$@" >"$log.step" 2>&1 </dev/null
    status=$?
    cat "$log.step" >>"$log"
    tail -n "${SHOWN_LINES:-12}" "$log.step"
    rm "$log.step"
    case $status in
        0) say "$name: passed in $((SECONDS - begin)) s" ;;
        124 | 137) say "$name: FAILED: stopped after $((SECONDS - begin)) s" && failed=1 ;;
        *) say "$name: FAILED with status $status after $((SECONDS - begin)) s: see '== $name' in $log" && failed=1 ;;
    esac
    return "$status"
}

# too_old PACKAGE VERSION: that it is, and which one would do.
too_old() {
    "$PYTHON" -c '
import sys
from importlib.metadata import version
name, wanted = sys.argv[1:]
found = version(name)
if [int(part) for part in found.split(".")[:2]] < [int(part) for part in wanted.split(".")]:
    print(f"{name} >= {wanted} (there is {found})", end=" ")' "$@" 2>/dev/null
}

# missing MODULE...: those that Python would not find.
missing() {
    "$PYTHON" -c 'import importlib.util as u, sys; print(*[m for m in sys.argv[1:] if u.find_spec(m) is None])' "$@"
}

build() {
    [ -e "$SITE/psstore" ] || "$PYTHON" -m pip install -v --no-build-isolation --no-deps --no-compile --upgrade --target "$SITE" . \
        -C build-dir="$TREE" -C cmake.define.PSSTORE_CUDA=on -C cmake.define.PSSTORE_WERROR=OFF \
        -C cmake.define.CMAKE_CUDA_ARCHITECTURES="$architectures" || return
    (cd / && "$PYTHON" -c "
import psstore._core, psstore.cuda, sys
# An editable install of this Python's would come first, and be tested in place of what was built here.
found = psstore._core.__file__
assert found.startswith('$SITE'), f'{sys.executable} imports {found}: uninstall that psstore, or set PYTHON to another one'
assert psstore.cuda.is_built(), 'the extension has no CUDA kernels'
print('loaded; it finds', psstore.cuda.device_count(), 'devices')
# Tests would all be skipped, and nobody would see that nothing was tested.
assert '$dry_run' or psstore.cuda.is_available(), 'the driver has a GPU that the extension does not find'")
}

sanitized() {
    # Not from torch's caching allocator: memcheck knows allocations, not what lies beside it in one of them.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --error-exitcode 9 \
        "$PYTHON" -m pytest "${pytest_options[@]}" -m "gpu and sanitized" -p no:cacheprovider tests/gpu/kernels
}

# ---- what there is ----

if gpu=$("$PYTHON" bench/gpu_device.py 2>&1); then
    IFS=$'\t' read -r name slug architecture <<<"$gpu"
    architectures=$architecture-real
    say "GPU: $name, architecture $architecture"
    if [ -n "$dry_run" ]; then say "dry run: it is not used"; fi
elif [ -n "$dry_run" ]; then
    architectures=90-real
    say "no GPU ($gpu); dry run: builds for architecture 90 and collects"
else
    say "no GPU can be used here: $gpu. Nothing was run; --dry-run builds and collects all the same."
    exit 2
fi
say "$("$PYTHON" --version 2>&1), $(nvcc --version 2>/dev/null | grep -o 'release [0-9.]*' || echo 'no nvcc')"

rm -rf "$SITE" && mkdir -p "$SITE"
if [ -n "$wheels" ]; then
    "$PYTHON" -m pip install --no-deps --no-compile --target "$SITE" "$wheels"/*.whl >>"$log" 2>&1 ||
        say "the wheels in $wheels can't be installed: see $log"
fi
"$PYTHON" -m pip list 2>/dev/null >>"$log"
lacking=$(missing numpy torch pytest)
if [ -e "$SITE/psstore" ]; then
    say "psstore is not built here, but the wheel's"
else
    lacking="$lacking $(missing pip pybind11 scikit_build_core) $(too_old pybind11 3.0)$(too_old scikit-build-core 0.11)"
    for tool in nvcc cmake ninja; do
        command -v "$tool" >/dev/null || lacking="$lacking $tool"
    done
fi
if [ -n "${lacking// /}" ]; then
    say "can't build and test without: $lacking"
    say "  packages: those of this Python, $(command -v "$PYTHON"); PYTHON=... chooses another one"
    say "  nvcc: of a CUDA toolkit >= 12, in /usr/local/cuda/bin or on the PATH"
    exit 1
fi

# ---- build ----

if ! step build "$BUILD_S" bash -c "$(declare -f build); $(declare -p PYTHON SITE TREE architectures dry_run); build"; then
    say "the later steps were not run: they need the extension"
    exit 1
fi

# A store needs msgspec, and the tests' own set-up psutil and hypothesis; kernels need neither.
pytest_options=(-q -o "pythonpath=.")
tests=(tests/gpu)
left_out=$(missing msgspec psutil hypothesis)
if [ -n "$left_out" ]; then
    say "left out: all tests and measurements with a store, for want of $left_out (bring wheels: --wheels FOLDER, see the head of this script)"
    pytest_options+=(--confcutdir tests/gpu)
    tests=(tests/gpu/kernels)
fi
without=$(missing cupy uvloop matplotlib rich pytest_timeout)
[ -z "$without" ] || say "also missing here: $without"
[[ " $without " == *" pytest_timeout "* ]] && pytest_options+=(-o addopts= --override-ini timeout=0)

if [ -n "$dry_run" ]; then
    step collect 120 "$PYTHON" -m pytest "${pytest_options[@]}" -m gpu --collect-only "${tests[@]}"
    step bench-options 60 "$PYTHON" -m bench.gpu --help
    exit "$failed"
fi

# ---- run ----

readonly tested=("$PYTHON" -m pytest "${pytest_options[@]}" -m gpu -p no:cacheprovider)

step kernels 100 "${tested[@]}" tests/gpu/kernels
SHOWN_LINES=80 step bench 170 "$PYTHON" -m bench.gpu --json "$results/$slug.json" --plot
if [ -z "$left_out" ]; then step stores 100 "${tested[@]}" --ignore tests/gpu/kernels tests/gpu; fi
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        step "$tool" 70 bash -c "$(declare -f sanitized); $(declare -p PYTHON pytest_options); sanitized $tool"
    done
else
    say "left out: compute-sanitizer, which is not on the PATH"
fi

printf '\n== summary\n'
cat "$summary"
exit "$failed"
