# Completion of trainworks, for zsh. `python build.py completion zsh` prints it.

# Completes `build.py`, `python build.py`, `trainworks` and `python -m trainworks`; fails for any other command line.
_trainworks() {
    local index=1 root=. word line
    local -a lines found
    if [[ ${words[1]:t} == python* ]]; then
        index=2
        while [[ ${words[index]} == -[^mc]* ]]; do ((index += 1)); done
        [[ ${words[index]} == -m && ${words[index + 1]} == trainworks ]] && ((index += 1))
    fi
    ((CURRENT > index)) || return 1
    word=${${(Q)words[index]}/#\~\//$HOME/}
    if [[ ${word:t} == build.py ]]; then
        root=${word:h}
        [[ -d $root/images && -d $root/templates ]] || return 1
    elif [[ ${word:t} != trainworks ]]; then
        return 1
    fi
    lines=("${(@f)$(@ASKED@ --root "$root" zsh -- "${(@Q)words[index + 1,CURRENT - 1]}" "${(Q)PREFIX}" 2>/dev/null)}")
    for line in "${(@)lines[2,-1]}"; do
        word=${line%%$'\t'*}
        found+=("${word//:/\\:}:${line#*$'\t'}")
    done
    _trainworks_status=1
    (($#found)) && _describe -V 'trainworks' found && _trainworks_status=0
    case ${lines[1]} in
        files) _files && _trainworks_status=0 ;;
        folders) _files -/ && _trainworks_status=0 ;;
    esac
    return 0
}

_trainworks_own() {
    _trainworks && return $_trainworks_status
    _default
}

_trainworks_python() {
    _trainworks && return $_trainworks_status
    ${=_trainworks_before[$service]:-_default} "$@"
}

(($+functions[compdef])) || { autoload -Uz compinit && compinit; }
typeset -gA _trainworks_before
typeset -g _trainworks_status
() {
    local name
    for name in python python3 python3.{11..14}; do
        [[ ${_comps[$name]} == _trainworks_python ]] || _trainworks_before[$name]=${_comps[$name]:-${_comps[python]}}
    done
    for name in python python3 python3.{11..14}; do
        [[ ${_trainworks_before[$name]} == _trainworks_python ]] && _trainworks_before[$name]=${_trainworks_before[python]}
        compdef _trainworks_python $name
    done
}
compdef _trainworks_own build.py trainworks
