"""Train: start a recipe under a profile, with the profile's processes or another number of them.

    python -m app launch recipes/cls.py
    python -m app launch fsdp_cpu:4 recipes/cls.py --run.dir runs/fsdp
    python -m app launch ddp_2nodes --machine_rank 1 --main_process_ip 10.0.0.1 recipes/cls.py

A profile is a file of accelerate's, or one of ours by its name; `:N` starts N processes. Without a profile, a recipe
trains on all GPUs of this machine, or on its CPU. Words before the recipe are options of `accelerate launch`; words
after it are flags of the recipe. `--num_machines M` spreads the profile's processes, or the N, over M machines,
whatever the profile says. This is `accelerate launch` with a port that is free, without a traceback that is not the
recipe's, and with the status of the run: 0 if it is finished or has reached --run.stop-at, 75 if a signal made it save
and leave early (repeat the command), 2 for a mistake in its flags or data, 130 after Ctrl-C twice, 128 and a signal's
number if a signal ended it.
"""

from pathlib import Path

from app.errors import UserError
from app.launching import program

_WORDS = "launch [PROFILE[:N]] [options of accelerate launch] RECIPE.py [flags of the recipe]"


def main_of_words(words: list[str]) -> int:
    """Start the recipe that the words name, and return its status.

    Raises:
        UserError: there is no such recipe or profile, or this machine cannot train under it.
    """
    from app.launching import accelerate_launch, profiles

    usage = program.typed(_WORDS)
    if not words or words[0] in ("-h", "--help") or (words[-1] in ("-h", "--help") and not _recipe_in(words)):
        print(f"usage: {usage}\n\n{program.as_typed(__doc__ or '')}")
        return 0
    chosen = "" if words[0].startswith("-") or words[0].endswith(".py") else words[0]
    rest = words[1:] if chosen else words
    recipe = _recipe_in(rest)
    if not recipe:
        raise UserError(f"there is no recipe among the words; usage: {usage}")
    profile = profiles.read(chosen or accelerate_launch.usual_profile(), flag="the profile")
    before = rest[: rest.index(recipe)]
    for word in before:
        if word.startswith("--") and "." in word.partition("=")[0]:
            raise UserError(f"{word}: flags of the recipe come after it: {usage}")
        if word.partition("=")[0].replace("-", "_") in ("__num_processes", "__config_file"):
            raise UserError(f"{word}: name the profile and its processes before the recipe, for example ddp:2")
    if not Path(recipe).is_file():
        raise UserError(f"{recipe}: there is no such file; give a recipe such as recipes/cls.py")
    machines = _machines(before)
    return accelerate_launch.launch(profile.over(machines) if machines else profile, rest)


def _machines(words: list[str]) -> int:
    """Return the number of machines that options of `accelerate launch` ask for; 0 if they say nothing of it.

    Raises:
        UserError: it is no number.
    """
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if flag.replace("-", "_") == "__num_machines":
            text = value if equals else following
            if not (text.isascii() and text.isdigit() and int(text)):
                raise UserError(f"--num_machines {text}: give the number of machines, for example --num_machines 2")
            return int(text)
    return 0


def _recipe_in(words: list[str]) -> str:
    """Return the first word that names a file of Python; empty if there is none."""
    return next((word for word in words if word.endswith(".py")), "")
