# shellcheck shell=bash
# Finds the Python that the environment is made from. Sourced; defines functions, does nothing.
#
#   memo_find_python ROOT    prints the path of a Python >= 3.12 with venv and pip, or says on
#                            stderr how to get one and returns 1

# The least Python that Megatron's wheel with megatron.training accepts.
MEMO_PYTHON_MINOR=12

# memo_python_verdict PYTHON: prints "ok PATH", or one word that says what is missing.
#
# Run from the repo root, so that a pyenv shim reads our .python-version. `sys.executable` is the
# interpreter behind a shim, which stays right when .python-version changes.
memo_python_verdict() {
    "$1" - "$MEMO_PYTHON_MINOR" 2>/dev/null <<'PY' || echo broken
import sys

if sys.version_info < (3, int(sys.argv[1])):
    print("old")
else:
    try:
        import ensurepip
        import venv
    except ImportError:
        print("novenv")
    else:
        print("ok", sys.executable)
PY
}

# memo_python_candidates: prints every interpreter worth a try, best first, one a line.
memo_python_candidates() {
    local name path
    # What .python-version names comes first where pyenv manages versions: python3 is then its shim.
    if command -v pyenv >/dev/null 2>&1; then
        pyenv which python 2>/dev/null || true
    fi
    for name in python3.12 python3.13 python3.14 python3 python; do
        # `type -P -a` so that a shim that refuses does not hide the same name further down PATH.
        type -P -a "$name" 2>/dev/null || true
    done
    # Versions that pyenv has installed and that .python-version does not select.
    for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
        if [[ -x $path ]]; then printf '%s\n' "$path"; fi
    done
}

memo_find_python() {
    local root=$1 candidate verdict found="" seen=$'\n' old="" novenv=""
    # A Python named by the user is taken or refused, never replaced by another.
    if [[ -n ${MEMO_PYTHON:-} ]]; then
        verdict=$(cd "$root" && memo_python_verdict "$MEMO_PYTHON")
        if [[ $verdict == ok\ * ]]; then
            printf '%s\n' "${verdict#ok }"
            return 0
        fi
        cat >&2 <<EOF
MEMO_PYTHON=$MEMO_PYTHON can not be used ($verdict): it has to be a Python 3.$MEMO_PYTHON_MINOR or
newer that can import venv and ensurepip. Name another, or unset MEMO_PYTHON to search PATH.
EOF
        return 1
    fi
    while IFS= read -r candidate; do
        [[ $seen == *$'\n'"$candidate"$'\n'* ]] && continue
        seen+="$candidate"$'\n'
        verdict=$(cd "$root" && memo_python_verdict "$candidate")
        case $verdict in
            ok\ *)
                found=${verdict#ok }
                break
                ;;
            old) old+=" $candidate" ;;
            novenv) novenv+=" $candidate" ;;
        esac
    done < <(cd "$root" && memo_python_candidates)
    if [[ -n $found ]]; then
        printf '%s\n' "$found"
        return 0
    fi
    {
        echo "No Python 3.$MEMO_PYTHON_MINOR or newer was found, and Megatron's package needs one."
        [[ -n $old ]] && echo "Too old:$old."
        [[ -n $novenv ]] &&
            echo "Without the venv module:$novenv (Debian and Ubuntu: apt install python3-venv)."
        echo "Get one by whichever of these your machine has, then run this again:"
        echo "    pyenv install 3.$MEMO_PYTHON_MINOR"
        echo "    uv python install 3.$MEMO_PYTHON_MINOR"
        echo "    conda create -n py312 python=3.$MEMO_PYTHON_MINOR && conda activate py312"
        echo "    apt install python3.$MEMO_PYTHON_MINOR python3.$MEMO_PYTHON_MINOR-venv"
        echo "or name one that is not on PATH: MEMO_PYTHON=/path/to/python $0"
    } >&2
    return 1
}
