# shellcheck shell=bash
# Makes the environment of this repo and keeps it up to date. Sourced after python.sh and
# progress.sh; defines functions, does nothing.
#
#   memo_ensure_env ROOT     makes or updates the environment; afterwards $MEMO_VENV_PYTHON runs in
#                            it. Returns non-zero, having said why, if that can not be done.
#
# The environment lies at ROOT/.venv, or where MEMO_VENV says. Three files in it tell its state:
#   .memo-env          these scripts made the folder, and may make it anew.
#   .memo-installing   written before anything is installed, removed when pip has ended. Found at
#                      the start, it says that an install was cut off, so that the environment is
#                      made anew: a half-unpacked package can look installed. (A pip that ends with
#                      an error cleans up after itself.)
#   .memo-stamp        written last: a hash of what was installed. As long as it agrees with the
#                      files of today, nothing is done.
# A lock beside the environment keeps two runs from installing at the same time.

# memo_stamp ROOT PYTHON: prints the hash that an up-to-date environment carries.
#
# The path is part of it because the scripts of an environment hold their absolute path, and the
# version of Python because packages are compiled for one.
memo_stamp() {
    "$2" - "$1" <<'PY'
import hashlib
import pathlib
import sys

root = pathlib.Path(sys.argv[1]).resolve()
digest = hashlib.sha256()
for part in (sys.version, sys.prefix, str(root)):
    digest.update(part.encode() + b"\0")
for name in (
    "requirements.txt",
    "requirements-dev.txt",
    "requirements-docs.txt",
    "pyproject.toml",
):
    digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
print(digest.hexdigest())
PY
}

# memo_pip PYTHON ARGS...: pip of the environment. Tests replace this function.
memo_pip() {
    local python=$1
    shift
    "$python" -m pip --disable-pip-version-check --no-input "$@"
}

# memo_env_is_current ROOT VENV: true when nothing has to be installed.
memo_env_is_current() {
    local root=$1 venv=$2 stamp
    [[ -x $venv/bin/python && -f $venv/.memo-stamp && ! -e $venv/.memo-installing ]] || return 1
    stamp=$(memo_stamp "$root" "$venv/bin/python" 2>/dev/null) || return 1
    [[ $stamp == "$(<"$venv/.memo-stamp")" ]]
}

# memo_lock FD: takes an exclusive lock on an open file, waiting for another run if there is one.
# Through Python, because flock(1) is not everywhere; the lock belongs to the shell's descriptor.
memo_lock() {
    local python=$1 fd=$2
    "$python" - "$fd" <<'PY'
import fcntl
import sys

fd = int(sys.argv[1])
try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("another run is making the environment; waiting for it", file=sys.stderr, flush=True)
    fcntl.flock(fd, fcntl.LOCK_EX)
PY
}

# memo_install ROOT VENV BASE_PYTHON: makes or updates the environment. Called under the lock.
memo_install() {
    local root=$1 venv=$2 base=$3 python=$2/bin/python status=0
    if [[ -e $venv && ! -e $venv/.memo-env ]]; then
        cat >&2 <<EOF
$venv was not made by these scripts, so they leave it alone. Move it away, or say where the
environment shall be instead: MEMO_VENV=/path/to/folder $0
EOF
        return 1
    elif [[ -e $venv/.memo-installing ]]; then
        memo_say "an earlier install was cut off; making the environment anew"
        rm -rf "$venv"
    elif [[ -e $venv ]] && ! memo_same_python "$python" "$base"; then
        memo_say "the environment was made by another Python; making it anew"
        rm -rf "$venv"
    fi

    mkdir -p "$venv" && : >"$venv/.memo-env" && : >"$venv/.memo-installing" || return 1
    rm -f "$venv/.memo-stamp"
    memo_fill "$root" "$venv" "$base" || status=$?
    rm -f "$venv/.memo-installing"
    ((status == 0)) || return "$status"
    # Written to one side and renamed: a stamp is whole or absent.
    memo_stamp "$root" "$python" >"$venv/.memo-stamp.new" || return 1
    mv "$venv/.memo-stamp.new" "$venv/.memo-stamp"
}

# memo_fill ROOT VENV BASE_PYTHON: the steps of an install, each watched.
memo_fill() {
    local root=$1 venv=$2 base=$3 python=$2/bin/python log=$2.log
    if [[ ! -x $python ]]; then
        memo_say "making $venv with $base"
        memo_watch "$log" "making the environment" "$base" -m venv "$venv" || return 1
    fi
    memo_say "installing requirements.txt, -dev and -docs (about 6 GB the first time)"
    memo_watch "$log" "installing" memo_pip "$python" install --progress-bar off \
        -r "$root/requirements.txt" -r "$root/requirements-dev.txt" \
        -r "$root/requirements-docs.txt" || return 1
    memo_watch "$log" "installing megatron_memo" memo_pip "$python" install --no-deps \
        --no-build-isolation -e "$root" || return 1
}

# memo_same_python VENV_PYTHON BASE_PYTHON: true when both are one version of Python.
memo_same_python() {
    local ask='import sys; print(sys.version)' mine theirs
    mine=$("$1" -c "$ask" 2>/dev/null) && theirs=$("$2" -c "$ask" 2>/dev/null) &&
        [[ $mine == "$theirs" ]]
}

memo_ensure_env() {
    local root=$1 venv=${MEMO_VENV:-$1/.venv} base fd status=0
    # shellcheck disable=SC2034  # read by the scripts that source this file
    MEMO_VENV_PYTHON=$venv/bin/python
    if memo_env_is_current "$root" "$venv"; then
        memo_say "environment $venv is up to date"
        return 0
    fi
    base=$(memo_find_python "$root") || return 1
    mkdir -p "$(dirname "$venv")" || return 1
    exec {fd}>"$venv.lock" || return 1
    memo_lock "$base" "$fd" || return 1
    # Another run may have finished while this one waited.
    if ! memo_env_is_current "$root" "$venv"; then
        memo_install "$root" "$venv" "$base" || status=$?
    fi
    exec {fd}>&-
    if ((status)); then
        echo "The environment $venv could not be made; the log is $venv.log." >&2
        return 1
    fi
    memo_say "environment $venv is ready"
}
