"""The commands next to training: python -m app COMMAND."""

import inspect
import sys

from app import __version__
from app.commands import load, summaries
from app.distributed.environment import report_user_errors
from app.errors import UserError, did_you_mean
from app.launching import program
from app.launching.dropped_output import outlive_readers
from app.launching.flags import check_letters, parse_command


def main(words: list[str]) -> int:
    """Run the command that the first word names, and return the exit status.

    Raises:
        UserError: there is no such command, or its options are wrong.
    """
    check_letters(words)
    if words[:1] == ["--version"]:
        print(f"samestep {__version__}")
        return 0
    summary_by_name = summaries()
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: {program.typed('COMMAND ...')}\n")
        print("\n".join(f"  {name:<10} {summary}" for name, summary in summary_by_name.items()))
        print("\n  --version  Print the version of Samestep.\n  --help     Print this text.")
        more, training = program.typed("COMMAND --help"), program.typed("launch recipes/cls.py")
        print(f"\n{more} says more. Training itself: {training}")
        return 0
    name = words[0]
    if name not in summary_by_name:
        names = ", ".join(summary_by_name)
        raise UserError(f"{name}: there is no such command; there are {names}{did_you_mean(name, summary_by_name)}")
    command = load(name)
    if hasattr(command, "main_of_words"):
        return command.main_of_words(words[1:])
    takes_flags = len(inspect.signature(command.main).parameters) > 1
    options, flags = parse_command(command.Options, words[1:], program.typed(name), takes_flags)
    return command.main(options, flags) if takes_flags else command.main(options)


def run() -> None:
    """Run the program `samestep`."""
    program.remember(sys.argv[0])
    outlive_readers()
    report_user_errors()
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
