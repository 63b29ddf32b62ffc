"""Print what makes a shell complete `samestep`: its commands, their options, and files.

    source <(samestep completion)            # bash; in ~/.bashrc for every shell
    source <(samestep completion --shell zsh)

Print it again after an update: it knows the commands of the version that printed it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from app.config import as_flag

SCRIPT = """_samestep() {
    local word=${COMP_WORDS[COMP_CWORD]} flags=
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "%s" -- "$word"))
        return
    fi
    case ${COMP_WORDS[1]} in
%s
    esac
    case $word in
        -*) COMPREPLY=($(compgen -W "$flags --help" -- "$word")) ;;
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}
complete -o filenames -F _samestep samestep"""


@dataclass
class Options:
    """For which shell."""

    shell: Literal["bash", "zsh"] = "bash"
    """The shell that reads it."""


def main(options: Options) -> int:
    """Print the script, and return the exit status."""
    from app.commands import load, summaries

    cases = []
    for name in summaries():
        fields = dataclasses.fields(load(name).Options)
        named = [as_flag(field.name) for field in fields if "Positional" not in str(field.type)]
        cases.append(f'        {name}) flags="{" ".join(named)}" ;;')
    if options.shell == "zsh":
        print("(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }")
        print("autoload -U +X bashcompinit && bashcompinit")
    print(SCRIPT % (" ".join(summaries()), "\n".join(cases)))
    return 0
