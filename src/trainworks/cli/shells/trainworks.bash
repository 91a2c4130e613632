# shellcheck shell=bash
# Completion of trainworks, for bash 4 or later. `python build.py completion bash` prints it.

# Completes `build.py`, `python build.py`, `trainworks` and `python -m trainworks`; fails for any other command line.
_trainworks() {
    local index=0 root=. current strip="" breaks line word glue=""
    local -a words=() lines=()
    if [[ ${COMP_WORDS[0]##*/} == python* ]]; then
        index=1
        while [[ ${COMP_WORDS[index]} == -[!mc]* ]]; do ((index += 1)); done
        [[ ${COMP_WORDS[index]} == -m && ${COMP_WORDS[index + 1]} == trainworks ]] && ((index += 1))
    fi
    ((COMP_CWORD > index)) || return 1
    word=${COMP_WORDS[index]/#\~\//$HOME/}
    if [[ ${word##*/} == build.py ]]; then
        [[ $word == */* ]] && root=${word%/*}
        [[ -d $root/images && -d $root/templates ]] || return 1
    elif [[ ${word##*/} != trainworks ]]; then
        return 1
    fi
    # bash breaks words at `=` and `:`; here they are whole again.
    for word in "${COMP_WORDS[@]:index + 1:COMP_CWORD - index}"; do
        word=${word//[\'\"\\]/}
        if [[ ${#words[@]} -gt 0 && ($glue || $word == [=:]*) ]]; then words[-1]+=$word; else words+=("$word"); fi
        glue=""
        [[ $word == *[=:] ]] && glue=1
    done
    current=${words[-1]}
    breaks=${COMP_WORDBREAKS//[!=:]/}
    [[ $breaks && $current == *[$breaks]* ]] && strip=${current%"${current##*["$breaks"]}"}

    mapfile -t lines < <(@ASKED@ --root "$root" bash -- "${words[@]}" 2>/dev/null)
    COMPREPLY=()
    for line in "${lines[@]:1}"; do
        word=${line%%$'\t'*}
        COMPREPLY+=("${word#"$strip"}")
    done
    case ${lines[0]} in
        files) compopt -o default ;;
        folders) compopt -o dirnames ;;
    esac
    return 0
}

_trainworks_python() {
    _trainworks && return
    local before=${_trainworks_before[${1##*/}]}
    if [[ $before ]]; then "$before" "$@"; else compopt -o default; fi
}

declare -gA _trainworks_before
_trainworks_set_up() {
    local name before load names=(python python3 python3.{11..14})
    # What bash-completion loads when it is needed is loaded now, because ours comes before it. It is one file for all.
    for load in _comp_load _completion_loader; do
        declare -F "$load" && for name in "${names[@]}"; do "$load" "$name"; done
    done
    for name in "${names[@]}"; do
        before=$(complete -p "$name" 2>/dev/null)
        if [[ $before == *" -F "* ]]; then
            before=${before##* -F }
            before=${before%% *}
            [[ $before == _trainworks_python || $before == _minimal ]] || _trainworks_before[$name]=$before
        fi
        complete -F _trainworks_python "$name"
    done
    complete -F _trainworks build.py trainworks
}
_trainworks_set_up >/dev/null 2>&1
unset -f _trainworks_set_up
