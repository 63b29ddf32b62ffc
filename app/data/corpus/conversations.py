"""Conversations: lists of messages, in the words of chat templates or of ShareGPT, written out as text."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from app.data.corpus.chat_template import ChatTemplate
from app.data.corpus.messages import FLAG, WANTED, is_learnt, is_left_out, messages_of, place_of
from app.data.tables.columns import is_list, is_mixed, name_of
from app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["Segments", "check_conversations", "columns_of_messages", "conversation", "messages_of"]

Segments = list[tuple[str, bool]]
"""Pieces of a text, and whether each is supervised."""


def check_conversations(table: "Dataset", name: str) -> None:
    """Raise a UserError if a column has no lists, or lists of something that cannot be messages."""
    kind = table.data.schema.field(name).type
    # Rows of several types are checked one by one.
    mixed = is_mixed(kind) or (is_list(kind) and is_mixed(kind.value_type))
    if not mixed and name not in columns_of_messages(table):
        raise UserError(f"{FLAG} {name} of {name_of(table)} holds {table.features[name]}: {WANTED}")


def columns_of_messages(table: "Dataset") -> list[str]:
    """List the columns whose types are those of conversations."""
    import pyarrow.types as types

    names = []
    for column in table.data.schema:
        if is_list(column.type) and types.is_struct(column.type.value_type):
            keys = {field.name for field in column.type.value_type}
            names += [column.name] if {"role", "content"} <= keys or {"from", "value"} <= keys else []
    return names


def conversation(row: Any, template: ChatTemplate, where: Callable[[], str]) -> Segments:
    """Write a row's conversation with the chat template; the assistant's messages and their end marks are supervised.

    Those that are marked as not to be learnt are not.

    Args:
        where: names the row in errors.

    Raises:
        UserError: the row is no conversation, the template refuses it or leaves a part of it out, or it writes the
            beginning of a conversation differently when more messages follow.
    """
    messages = messages_of(row, where, template=template.source)
    whole = template.write_whole(messages, where)

    def write(count: int, **options: Any) -> str:
        return template.write(messages[:count], where, **options) if count < len(messages) else whole

    segments, done = [], 0
    for turn, message in enumerate(messages):
        if not is_learnt(message) or is_left_out(message, partial(place_of, FLAG, turn, where)):
            continue
        before, after = write(turn, add_generation_prompt=True) if turn else "", write(turn + 1)
        if not after.startswith(before):
            before = write(turn)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
            raise UserError(
                f"{FLAG}: the chat template writes message {turn} of {where()} differently when more follow "
                "it, so the assistant's part of the text cannot be found; cut conversations so that each ends there"
            )
        segments += [(whole[done : len(before)], False), (whole[len(before) : len(after)], True)]
        done = len(after)
    return [*segments, (whole[done:], False)]
