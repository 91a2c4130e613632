# Completion of trainworks, for fish 3 or later. `python build.py completion fish` prints it.

# Whether the command line is `build.py`, `python build.py`, `trainworks` or `python -m trainworks`. Where it is, prints
# the checkout that is meant, then the words behind the program.
function __trainworks_line
    set -l words (commandline -opc)
    set -l index 1
    if string match -qr '(^|/)python[0-9.]*$' -- $words[1]
        set index 2
        while string match -qr '^-[^mc]' -- "$words[$index]"
            set index (math $index + 1)
        end
        test "$words[$index]" = -m; and test "$words[$(math $index + 1)]" = trainworks; and set index (math $index + 1)
    end
    set -l word (string replace -r '^~/' "$HOME/" -- "$words[$index]")
    set -l root .
    if string match -qr '(^|/)build\.py$' -- "$word"
        set root (string replace -r '/?build\.py$' '' -- "$word")
        test -n "$root"; or set root .
        test -d "$root/images" -a -d "$root/templates"; or return 1
    else if not string match -qr '(^|/)trainworks$' -- "$word"
        return 1
    end
    printf '%s\n' $root $words[(math $index + 1)..]
end

function __trainworks_ours
    __trainworks_line >/dev/null
end

function __trainworks_answer
    set -l line (__trainworks_line)
    set -l current (commandline -ct)
    set -l lines (@ASKED@ --root $line[1] fish -- $line[2..] "$current" 2>/dev/null)
    printf '%s\n' $lines[2..]
    switch "$lines[1]"
        case files
            __fish_complete_path "$current"
        case folders
            __fish_complete_directories "$current"
    end
end

for name in build.py trainworks python python3 python3.{11,12,13,14}
    complete --command $name --condition __trainworks_ours --no-files --keep-order --arguments '(__trainworks_answer)'
end
