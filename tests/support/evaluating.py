"""What tests of python -m app evaluate share."""

from app.commands.evaluate import command, models, subject, worker
from app.launching.flags import parse_command
from app.rundir import history


def as_it_is(place, *words) -> dict:
    """Evaluate a run or a model in this process, as the command does in another, and return what it found."""
    options, flags = parse_command(command.Options, [str(place), *map(str, words)], "", True)
    is_run = not models.is_model(options.run)
    found = subject.of_run(options, history.read(options.run)) if is_run else models.of_model(options, flags)
    evaluation = worker.Evaluation(found.state, found.averaged, found.only)
    return worker.evaluate(found.recipe, [*found.flags, *flags], evaluation, found.imports)
