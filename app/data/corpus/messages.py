"""Messages of conversations as rows hold them, brought to one form: who speaks, in the words of chat templates."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from app.errors import UserError, did_you_mean

# Words for who speaks, in chat templates, in ShareGPT's data and in those of other tools, and what templates call them.
SPEAKERS = {
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "user": "user",
    "human": "user",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
LEARNT = "assistant"
"""The role whose messages are learnt. A template of its own words may call it otherwise."""
CALL = "function_call"
"""A message of the assistant that calls a function: json with its name and arguments."""
MARKS = ("weight", "train", "trainable", "loss", "loss_mask")
"""Keys by which tools mark a message of the assistant that is not to be learnt: with 0 or false."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Keys of what the assistant thought before its answer. A template writes the one that its model was trained with."""
TOOLS = "tools"
"""The column of the functions that the assistant may call in a row's conversation, as OpenAI's files have it."""
FLAG = "--data.messages"
WANTED = "each row must be a list of messages with role and content, or with from and value (ShareGPT)"
_OWN = {"role", "from", "content", "value"}


def messages_of(row: Any, where: Callable[[], str], flag: str = FLAG, template: str = "") -> list[dict]:
    """Return a row's messages with role and content.

    Args:
        row: a list of messages, or a single one.
        where: names the row in errors.
        flag: the one that names the column.
        template: the chat template, which may name further roles.

    Raises:
        UserError: the row holds no messages; or one has no role, an unknown one, or nothing that is a text.
    """
    if isinstance(row, dict):
        row = [row]
    if not isinstance(row, list) or not row:
        what = "an empty list" if row == [] else "nothing" if row is None else f"a {type(row).__name__}"
        raise UserError(f"{flag}: {where()} holds {what}: {WANTED}, or leave the row out of the data")
    return [_message(message, partial(place_of, flag, turn, where), template) for turn, message in enumerate(row)]


def place_of(flag: str, turn: int, where: Callable[[], str]) -> str:
    """Name a message of a row for errors."""
    return f"{flag}: message {turn} of {where()}"


def _message(message: Any, what: Callable[[], str], template: str) -> dict:
    if not isinstance(message, dict):
        raise UserError(f"{what()} is {message!r}: {WANTED}")
    # Tables give every message the keys of all others, without a value.
    fields = {
        key: value for key, value in message.items() if value is not None and not (value == [] and key == "tool_calls")
    }
    if "role" not in fields and not {"from", "value"} <= set(fields):
        raise UserError(f"{what()} has {', '.join(fields) or 'nothing'}: {WANTED}")
    said, text = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    more = {key: _without_nothing(value) for key, value in fields.items() if key not in _OWN}
    if _word(said) == CALL:
        return {**more, "role": LEARNT, "content": None, "tool_calls": [_call(text, what)]}
    # An assistant that calls a tool may say nothing.
    if text is None and "tool_calls" not in more:
        raise UserError(f"{what()} has a role and no content: give it one, or leave the row out")
    return {**more, "role": _role(said, what, template), "content": None if text is None else _text(text, what)}


def _role(said: Any, what: Callable[[], str], template: str) -> str:
    """Return a template's word for who speaks: its own, where the template writes out this one between quotes."""
    role = SPEAKERS.get(_word(said), "")
    if isinstance(said, str) and _names(template, said) and not (role == LEARNT and _names(template, LEARNT)):
        return said
    if not role:
        raise UserError(
            f"{what()} has the role {said!r}, which is neither one of {', '.join([*SPEAKERS, CALL])} nor named by the "
            f"chat template: write one of these, or leave the row out of the data{did_you_mean(_word(said), SPEAKERS)}"
        )
    return role


def is_learnt(message: dict) -> bool:
    """Tell whether a message is the assistant's, by whichever word the template calls it."""
    return SPEAKERS.get(_word(message["role"])) == LEARNT


def is_left_out(message: dict, what: Callable[[], str]) -> bool:
    """Tell whether a message is marked as one that is not to be learnt.

    Args:
        what: names the message in errors.

    Raises:
        UserError: a mark is neither yes nor no.
    """
    marks = {mark: message[mark] for mark in MARKS if message.get(mark) is not None}
    for mark, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise UserError(
                f"{what()} has the {mark} {value!r:.60}, and a message is learnt (1, true) or not (0, false): write "
                "one of these, or take the key out"
            )
    return not all(marks.values())


def tools_of(value: Any, what: Callable[[], str]) -> list[dict]:
    """Return the functions that a row's conversation may call: a list of them, or its json.

    Args:
        what: names the row in errors.

    Raises:
        UserError: it is no such list.
    """
    tools = value
    if isinstance(value, str) and value.strip():
        try:
            tools = json.loads(value)
        except ValueError:
            tools = value
    if not tools or (isinstance(tools, str) and not tools.strip()):
        return []
    if not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(
            f"{what()} has in the column {TOOLS} {value!r:.60}: give a list of functions as chat templates know them, "
            '[{"type": "function", "function": {"name": ...}}], or its json; or rename the column'
        )
    return [_without_nothing(tool) for tool in tools]


def with_objects(message: dict) -> dict:
    """Return a message whose calls have their arguments as objects, which OpenAI writes as json in a text."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _names(template: str, role: str) -> bool:
    return re.search(rf"""['"]{re.escape(role)}['"]""", template) is not None


def _word(said: Any) -> str:
    return said.strip().lower() if isinstance(said, str) else ""


def _text(content: Any, what: Callable[[], str]) -> str:
    """Return a content as text: as it is, or joined from a list of parts of the type text, as in OpenAI's form."""
    if isinstance(content, str):
        return content
    if isinstance(content, int) and not isinstance(content, bool):
        return str(content)
    if not isinstance(content, list):
        raise UserError(f"{what()} has a content that is no text but a {type(content).__name__}: write it as text")
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UserError(
                f"{what()} has parts that are no texts (type {kind}): a language model reads texts alone; leave the "
                "row out of the data"
            )
    return "".join(part["text"] for part in content)


def _call(text: Any, what: Callable[[], str]) -> dict:
    """Read a call of a function, as chat templates know it."""
    try:
        call = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        call = None
    if not (isinstance(call, dict) and isinstance(call.get("name"), str) and call.get("arguments") is not None):
        raise UserError(
            f"{what()} is a {CALL}, and no json with a name and arguments: write it so, or as a message of the "
            "assistant"
        )
    return {"type": "function", "function": {"name": call["name"], "arguments": _without_nothing(call["arguments"])}}


def _without_nothing(value: Any) -> Any:
    """Leave out keys without a value, which tables add to all rows where one of them has the key."""
    if isinstance(value, dict):
        return {key: _without_nothing(item) for key, item in value.items() if item is not None}
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value
