"""One prompt with two answers, as texts: of texts, or of conversations that the chat template writes out."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from app.data.corpus.chat_template import ChatTemplate
from app.data.corpus.messages import LEARNT, is_learnt, is_left_out, messages_of, place_of
from app.data.tables.columns import ANSWERS
from app.errors import UserError


def texts_of(row: dict[str, Any], template: ChatTemplate, where: Callable[[], str]) -> tuple[str, str, str]:
    """Return a row's prompt, and its chosen and rejected answers, as texts.

    Args:
        row: prompt (if there is one), chosen and rejected: texts, messages or lists of messages.
        where: names the row in errors.

    Raises:
        UserError: answers are equal or empty, or they share no prompt.
    """
    if all(isinstance(value, str | int) for value in row.values()):
        prompt, *texts = _parts_of(row)
        _check_answers(texts, texts, where)
        return prompt, texts[0], texts[1]
    asked, *answers = _chats_of(row, where, template.source)
    for flag, answer in zip(ANSWERS, answers, strict=True):
        if not is_learnt(answer[0]):
            raise UserError(
                f"--data.{flag}: the answer of {where()} begins with a message of the {answer[0]['role']}, and only "
                "the assistant answers: give answers to the same messages, or leave the row out of the data"
            )
        places = [partial(place_of, f"--data.{flag}", turn, where) for turn in range(len(answer))]
        if any(map(is_left_out, answer, places)):
            raise UserError(
                f"--data.{flag}: the answer of {where()} has a message that is marked as not to be learnt, and answers "
                "are learnt as a whole: take the mark out, or the row"
            )
    words = [
        "".join(str(message.get("content") or message.get("tool_calls") or "") for message in answer)
        for answer in answers
    ]
    _check_answers(answers, words, where)
    return _written(asked, answers, template, where)


def _check_answers(answers: Sequence[Any], words: Sequence[str], where: Callable[[], str]) -> None:
    """Raise a UserError if the words of an answer are none, or both answers are equal."""
    for flag, text in zip(ANSWERS, words, strict=True):
        if not text.strip():
            raise UserError(f"--data.{flag}: {where()} has an empty answer; leave such rows out of the data")
    if answers[0] == answers[1]:
        raise UserError(
            f"--data.chosen, --data.rejected: both answers of {where()} are the same, so none is preferred; leave such "
            "rows out of the data"
        )


def _parts_of(row: dict[str, Any]) -> list[str]:
    """Return prompt and answers of texts; without a prompt, answers begin with the same words, which are it."""
    chosen, rejected = (str(row[flag]) for flag in ANSWERS)
    if "prompt" in row:
        return [str(row["prompt"]), chosen, rejected]
    prompt = shared_beginning(chosen, rejected)
    return [prompt, chosen[len(prompt) :], rejected[len(prompt) :]]


def shared_beginning(chosen: str, rejected: str) -> str:
    """Return the words that two texts begin with alike."""
    shared = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
    # Before the last space, because tokens of words begin with theirs.
    return chosen[: max((i for i, sign in enumerate(shared) if sign.isspace()), default=0)]


def _chats_of(row: dict[str, Any], where: Callable[[], str], template: str) -> list[list[dict]]:
    """Return prompt and answers as messages; without a prompt, answers begin with the same messages, which are it.

    A prompt that is a text is a message of the user, where answers begin with the assistant's.
    """
    said = {
        flag: [{"role": LEARNT if flag in ANSWERS else "user", "content": str(value)}]
        if isinstance(value, str | int)
        else messages_of(value, where, f"--data.{flag}", template)
        for flag, value in row.items()
    }
    chosen, rejected = (said[flag] for flag in ANSWERS)
    whole = not isinstance(row.get("prompt"), list | dict) and not (is_learnt(chosen[0]) or is_learnt(rejected[0]))
    if "prompt" in said and not whole:
        prompt = said["prompt"]
        both = [answer[: len(prompt)] == prompt and len(answer) > len(prompt) for answer in (chosen, rejected)]
        return [prompt, *(answer[len(prompt) :] if all(both) else answer for answer in (chosen, rejected))]
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise UserError(
            f"--data.chosen, --data.rejected: the conversations of {where()} do not begin with the same message, "
            "which is the prompt; give --data.prompt, or leave the row out of the data"
        )
    return [chosen[:shared], chosen[shared:], rejected[shared:]]


def _written(
    prompt: list[dict], answers: list[list[dict]], template: ChatTemplate, where: Callable[[], str]
) -> tuple[str, str, str]:
    """Write messages with the chat template; what it writes for a model to go on from belongs to the prompt."""
    wholes = [
        template.write_whole([*prompt, *answer], where, f"--data.{flag}")
        for flag, answer in zip(ANSWERS, answers, strict=True)
    ]
    for options in ({"add_generation_prompt": True}, {}):
        begins = template.write(prompt, where, "--data.prompt", **options)
        if all(whole.startswith(begins) and len(whole) > len(begins) for whole in wholes):
            return begins, wholes[0][len(begins) :], wholes[1][len(begins) :]
    raise UserError(
        f"--data.prompt: the chat template writes the prompt of {where()} differently when an answer follows it, so "
        "the answer's part of the text cannot be found; leave the row out of the data"
    )
