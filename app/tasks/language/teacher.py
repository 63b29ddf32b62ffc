"""Models that stand by in each step and are not trained: the teacher of a distillation, the copy of a reference."""

from typing import TYPE_CHECKING, Any

from app.data.text.preference_table import TrainingPairs
from app.errors import UserError
from app.tasks.language.loading import load_language_model
from app.tasks.language.preference import Distill
from app.tasks.language.reference import contents_of
from app.tasks.pretrained import read_tokenizer
from app.tasks.vocabulary import check_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_teacher(
    distill: Distill, tokenizer: "PreTrainedTokenizerBase", run: Any, pairs: TrainingPairs
) -> "Callable[..., Any] | None":
    """Load the model of --distill.teacher, whole on each process's device, in evaluation mode; None if there is none.

    Its contents are noted in the pairs to train on, so that a run is not resumed with another teacher. Every rank takes
    part.

    Raises:
        UserError: it cannot be loaded, or its tokens are not the model's.
    """
    if not distill.teacher:
        return None
    flag = f"--distill.teacher {distill.teacher}"
    try:
        teacher_tokenizer, config = read_tokenizer(distill.teacher, tokenizer.model_max_length)
        if teacher_tokenizer.get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"{flag}: its tokens are not those of the model ({len(teacher_tokenizer):,} and {len(tokenizer):,} of "
                "them), so their probabilities cannot be compared: give a teacher with the same tokenizer"
            )
        check_vocabulary(distill.teacher, config, teacher_tokenizer)
        teacher = load_language_model(distill.teacher, masked=False, trained=False, needs=run.needs)
    except UserError as error:
        raise UserError(str(error).replace(f"--model {distill.teacher}", flag)) from error
    if not run.for_other_device:  # a plan or an export compares nothing
        pairs.models["the teacher"] = contents_of(teacher)
    return _standing_by(teacher, run)


def load_copy(name: str, contents: str, run: Any, pairs: TrainingPairs) -> "Callable[..., Any]":
    """Load the model that --model names once more, as `load_teacher` does.

    Args:
        contents: what `contents_of` returned for the model that is trained.
    """
    pairs.models["the reference model"] = contents
    return _standing_by(load_language_model(name, masked=False, trained=False, needs=run.needs), run)


def _standing_by(model: "PreTrainedModel", run: Any) -> "Callable[..., Any]":
    """Place a model on this process's device; it computes in the run's precision."""
    placed = model.requires_grad_(False).eval().to("meta" if run.for_other_device else run.accelerator.device)

    def answers(**inputs: Any) -> Any:
        with run.accelerator.autocast():
            return placed(**inputs)

    return answers
