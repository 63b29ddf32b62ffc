"""Print a script with which a shell completes `samestep`: its commands, their options, and files.

    source <(samestep completion)                   # bash; in ~/.bashrc for every shell
    source <(samestep completion --shell zsh)       # zsh; in ~/.zshrc
    samestep completion --shell fish | source       # fish; in ~/.config/fish/config.fish

Print it again after an update: it knows the commands of the version that printed it.
"""

# tyro can print such scripts too (--tyro-write-completion). Those of tyro 1.0.17 were tried: they offer no files for
# positional arguments, which the recipe and the run's folder are, and take parts of a help text for an option's values.

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from app.config import as_flag

BASH = """_samestep() {
    local word=${COMP_WORDS[COMP_CWORD]} flags= words=
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "%s" -- "$word"))
        return
    fi
    case ${COMP_WORDS[1]} in
%s
    esac
    case $word in
        -*) COMPREPLY=($(compgen -W "$flags --help" -- "$word")) ;;
        *) COMPREPLY=($(compgen -W "$words" -- "$word") $(compgen -f -- "$word")) ;;
    esac
}
complete -o filenames -F _samestep samestep"""
ZSH = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\nautoload -U +X bashcompinit && bashcompinit"


@dataclass
class Options:
    """The shell to complete in."""

    shell: Literal["bash", "zsh", "fish"] = "bash"
    """The shell that reads the script."""


def main(options: Options) -> int:
    """Print the script, and return the exit status."""
    from app.commands import load, summaries
    from app.launching.profiles import names

    flags: dict[str, list[str]] = {}
    for name in summaries():
        kind = getattr(load(name), "Options", None)
        flags[name] = [*_flags(kind)] if kind else []
    if options.shell == "fish":
        print(_for_fish(flags, names()))
        return 0
    if options.shell == "zsh":
        print(ZSH)
    cases = [f'        {name}) flags="{" ".join(words)}" ;;' for name, words in flags.items() if name != "launch"]
    cases.append(f'        launch) words="{" ".join(names())}" ;;')
    print(BASH % (" ".join(flags), "\n".join(cases)))
    return 0


def _flags(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield the flags of a class of options, and of those inside it."""
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.type):
            yield from _flags(field.type, f"{prefix}{field.name}.")
        elif "Positional" not in str(field.type):
            yield as_flag(f"{prefix}{field.name}")


def _for_fish(flags: dict[str, list[str]], profiles: list[str]) -> str:
    """Write the script for fish, which completes files by itself where nothing else is known."""
    lines = [f"complete -c samestep -n __fish_use_subcommand -f -a '{' '.join(flags)}'"]
    for name, words in flags.items():
        seen = f"complete -c samestep -n '__fish_seen_subcommand_from {name}' -l"
        lines += [f"{seen} {word.removeprefix('--')} -r" for word in words] + [f"{seen} help"]
    lines.append(f"complete -c samestep -n '__fish_seen_subcommand_from launch' -a '{' '.join(profiles)}'")
    return "\n".join(lines)
