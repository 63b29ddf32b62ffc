"""What tests of python -m app evaluate share."""

from app.commands.evaluate import command, models, worker
from app.launching.dry_run import play
from app.launching.flags import parse_command


def as_it_is(model, *words) -> dict:
    """Evaluate a finished model in this process, as the command does in another, and return what it found."""
    options, flags = parse_command(command.Options, [str(model), *map(str, words)], "", True)
    found = models.of_model(options, flags)
    evaluation = worker.Evaluation(found.state, found.averaged)
    play(found.recipe, [*found.flags, *flags], evaluation, found.imports)
    return evaluation.result()
