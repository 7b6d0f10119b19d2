# shellcheck shell=bash
# What the scripts show a person. Sourced; defines functions, does nothing.

# memo_say TEXT: one line of what is going on.
memo_say() {
    printf '== %s\n' "$1"
}

# memo_watch LOG LABEL COMMAND...: runs a command with its output in LOG, and shows every
# MEMO_WATCH_SECONDS (10) how long it has run and its last line, so that it is never silent for
# long. Shows the end of LOG if the command fails. Returns the command's exit status.
memo_watch() {
    local log=$1 label=$2 pid status=0 start=$SECONDS shown=$SECONDS line
    shift 2
    mkdir -p "$(dirname "$log")" && : >"$log" || return 1
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    # A background job of a script ignores Ctrl-C, so hand it on.
    trap 'memo_stop "$pid"; exit 130' INT
    trap 'memo_stop "$pid"; exit 143' TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS - shown >= ${MEMO_WATCH_SECONDS:-10})); then
            shown=$SECONDS
            # The last line that says what is done; pip's warnings about its own sources do not.
            line=$(tail -n 50 "$log" | grep -v '^ *WARNING' | tail -n 1 | tr -d '\r' | cut -c 1-80)
            printf '   %s, %ds: %s\n' "$label" $((SECONDS - start)) "$line"
        fi
    done
    wait "$pid" || status=$?
    trap - INT TERM
    if ((status)); then
        printf '%s failed with status %d; the end of %s:\n' "$label" "$status" "$log" >&2
        tail -n 25 "$log" | sed 's/^/   | /' >&2
    fi
    return "$status"
}

# memo_stop PID: ends a child and its own children.
memo_stop() {
    local child
    for child in $(pgrep -P "$1" 2>/dev/null); do memo_stop "$child"; done
    kill -TERM "$1" 2>/dev/null || true
}
