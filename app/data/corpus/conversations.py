"""Conversations: lists of messages, in the words of chat templates or of ShareGPT, written out as text."""

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from app.data.tables.columns import is_list, name_of
from app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

# ShareGPT's words for who speaks, and the roles of chat templates.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
FLAG = "--data.messages"
WANTED = "each row must be a list of messages with role and content, or with from and value (ShareGPT)"

Segments = list[tuple[str, bool]]
"""Pieces of a text, and whether each is supervised."""


def check_conversations(table: "Dataset", name: str) -> None:
    """Raise a UserError if a column has no lists, or lists of something that cannot be messages."""
    kind = table.data.schema.field(name).type
    # Rows of several types are checked one by one.
    mixed = isinstance(kind, _extension()) or (is_list(kind) and isinstance(kind.value_type, _extension()))
    if not mixed and name not in columns_of_messages(table):
        raise UserError(f"--data.messages {name} of {name_of(table)} holds {table.features[name]}: {WANTED}")


def columns_of_messages(table: "Dataset") -> list[str]:
    """List the columns whose types are those of conversations."""
    import pyarrow.types as types

    found = []
    for column in table.data.schema:
        if is_list(column.type) and types.is_struct(column.type.value_type):
            keys = {field.name for field in column.type.value_type}
            found += [column.name] if {"role", "content"} <= keys or {"from", "value"} <= keys else []
    return found


def _extension() -> type:
    import pyarrow

    return pyarrow.BaseExtensionType


def messages_of(row: Any, where: Callable[[], str], flag: str = FLAG) -> list[dict]:
    """Return a row's messages with role and content.

    Args:
        where: names the row in errors.
        flag: the one that names the column.

    Raises:
        UserError: the row is no list of messages, or a message lacks its role or its content.
    """
    if not isinstance(row, list) or not row:
        what = "an empty list" if row == [] else "nothing" if row is None else f"a {type(row).__name__}"
        raise UserError(f"{flag}: {where()} holds {what}: {WANTED}, or leave the row out of the data")
    return [_message(message, f"{flag}: message {turn} of", where) for turn, message in enumerate(row)]


def _message(message: Any, what: str, where: Callable[[], str]) -> dict:
    if not isinstance(message, dict):
        raise UserError(f"{what} {where()} is {message!r}: {WANTED}")
    if (role := message.get("role")) is not None:
        near = difflib.get_close_matches(str(role).lower(), set(ROLES.values()), 1, cutoff=0.8)
        if near and role not in ROLES.values():  # its messages would be left out of the loss in silence
            raise UserError(f"{what} {where()} has the role {role!r}: write {near[0]}")
        # An assistant that calls a tool may say nothing.
        if message.get("content") is None and not message.get("tool_calls"):
            raise UserError(f"{what} {where()} has a role and no content: give it one, or leave the row out")
        if isinstance(message.get("content"), list):
            return {**message, "content": _text_of(message["content"], f"{what} {where()}")}
        return message
    speaker, text = message.get("from"), message.get("value")
    if speaker is None or text is None:
        keys = ", ".join(key for key, value in message.items() if value is not None) or "nothing"
        raise UserError(f"{what} {where()} has {keys}: {WANTED}")
    if speaker not in ROLES:
        raise UserError(f"{what} {where()} is from {speaker!r}: use one of {', '.join(ROLES)}")
    return {"role": ROLES[speaker], "content": text}


def _text_of(parts: list, what: str) -> str:
    """Join the parts of a content that is a list of texts, as in OpenAI's form."""
    if not all(
        isinstance(part, dict) and part.get("type") == "text" and part.get("text") is not None for part in parts
    ):
        raise UserError(f"{what} has parts that are no texts: a language model reads texts alone; leave the row out")
    return "".join(part["text"] for part in parts)


def written(
    messages: list[dict],
    tokenizer: "PreTrainedTokenizerBase",
    where: Callable[[], str],
    flag: str = FLAG,
    **options: Any,
) -> str:
    """Write messages with the chat template.

    Args:
        where: names the row in errors.
        flag: the one that names the column.
        options: of transformers' apply_chat_template.

    Raises:
        UserError: the template refuses them.
    """
    from jinja2 import TemplateError

    try:
        return cast(str, tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise UserError(
            f"{flag}: the chat template of --model refuses {where()}, whose roles are {roles}: {error}; "
            "change the row, or leave it out of the data"
        ) from None


def conversation(row: Any, tokenizer: "PreTrainedTokenizerBase", where: Callable[[], str]) -> Segments:
    """Write a row's conversation with the chat template; the assistant's messages and their end marks are supervised.

    Args:
        where: names the row in errors.

    Raises:
        UserError: the row is no conversation, the template refuses it, or the template writes the beginning of a
            conversation differently when more messages follow.
    """
    messages = messages_of(row, where)

    def write(count: int, **options: Any) -> str:
        return written(messages[:count], tokenizer, where, **options)

    whole, segments, done = write(len(messages)), [], 0
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = write(turn, add_generation_prompt=True) if turn else "", write(turn + 1)
        if not after.startswith(before):
            before = write(turn)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
            raise UserError(
                f"--data.messages: the chat template writes message {turn} of {where()} differently when more follow "
                "it, so the assistant's part of the text cannot be found; cut conversations so that each ends there"
            )
        segments += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return [*segments, (whole[done:], False)]
