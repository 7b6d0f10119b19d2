#!/usr/bin/env bash
# Puts memo's patches into a Megatron-LM checkout, and takes them out again:
#     ./scripts/apply_patches.sh check  CHECKOUT     says for each patch how it stands
#     ./scripts/apply_patches.sh apply  CHECKOUT     all of them, or none if one does not fit
#     ./scripts/apply_patches.sh revert CHECKOUT     all that are in
# patches/README.md says what each is for and which versions it is tested with.
# Exit status: 0 done (check: all are in or would fit), 1 a patch does not fit, 2 a wrong call.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

# The versions of Megatron whose `pretrain` memo's launcher can call.
LEAST_MINOR=16

fail() {
    echo "apply_patches.sh: error: $1" >&2
    exit "${2:-2}"
}

[[ $# == 2 && $1 =~ ^(check|apply|revert)$ ]] ||
    fail "give check, apply or revert, and the folder of a Megatron-LM checkout"
action=$1
[[ -d $2 ]] || fail "$2: there is no such folder. Give a Megatron-LM checkout."
checkout=$(cd -- "$2" && pwd)
info=$checkout/megatron/core/package_info.py
[[ -f $info && -f $checkout/pretrain_gpt.py ]] ||
    fail "$2: is no Megatron-LM checkout: pretrain_gpt.py or megatron/core/package_info.py is missing"

number() { sed -n "s/^$1 = \([0-9]*\).*/\1/p" "$info"; }
version=$(number MAJOR).$(number MINOR)
if [[ $action != revert ]] && ((${version%%.*} == 0 && ${version#*.} < LEAST_MINOR)); then
    fail "$2: is Megatron core $version, and memo works with 0.$LEAST_MINOR and newer. Take branch \
core_r0.19.0 or another one from core_r0.$LEAST_MINOR.0 on." 1
fi

# A repository further up must not make git look for the files elsewhere.
GIT_CEILING_DIRECTORIES=$(dirname -- "$checkout")
export GIT_CEILING_DIRECTORIES
try() { (cd -- "$checkout" && git apply -C1 "$@" 2>/dev/null); }

# state PATCH: prints in, fits or conflict.
state() {
    if try --check --reverse "$1"; then
        echo in
    elif try --check "$1"; then
        echo fits
    else
        echo conflict
    fi
}

patches=("$root"/patches/*.patch)
todo=() conflicts=0
for patch in "${patches[@]}"; do
    name=$(basename -- "$patch") found=$(state "$patch")
    case $action:$found in
        check:in | apply:in) echo "$name: is in" ;;
        check:fits) echo "$name: fits, not in" ;;
        revert:fits) echo "$name: is not in" ;;
        apply:fits | revert:in) todo+=("$patch") ;;
        *)
            conflicts=1
            echo "$name: does not fit this checkout (core $version); the lines that it goes by are" \
                "not there or were changed. Change the file by hand, or start pretrain_gpt_memo.py." >&2
            ;;
    esac
done
((conflicts == 0)) || fail "nothing was changed" 1
for patch in "${todo[@]}"; do
    if [[ $action == apply ]]; then try "$patch"; else try --reverse "$patch"; fi
    echo "$(basename -- "$patch"): $([[ $action == apply ]] && echo put in || echo taken out)"
done
