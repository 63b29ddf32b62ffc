"""A tokenizer's chat template: what it writes for messages, on the date of a run."""

import copy
import datetime
import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from app.data.config import today
from app.data.corpus.messages import FLAG, THOUGHTS, TOOLS, tools_of, with_objects
from app.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The function of transformers by which templates ask for the time.
_NOW = "strftime_now"
# Takes its place: transformers hands no functions on to a template. The line end belongs to the last tag.
_OWN_NOW = """
{%- macro strftime_now(format) -%}
    {%- set own = namespace(text=format.replace("%%", "\\0")) -%}
    {%- for mark, word in date_of_the_run.items() -%}{%- set own.text = own.text.replace(mark, word) -%}{%- endfor -%}
    {{- own.text.replace("\\0", "%") -}}
{%- endmacro %}
"""
_MARKS = re.compile("%[-_0^#]?[A-Za-z]")
# What a template raises on messages that it does not expect, apart from jinja's own errors.
_FAULTS = (TypeError, ValueError, AttributeError, LookupError)
# A call whose arguments are json in a text, as in OpenAI's files; some templates take ids of nine letters alone.
_ASKS = {"name": "f", "arguments": '{"key": 1}'}
_CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "call00000", "function": _ASKS}]},
]
# What stands in the text where a template makes json of the json, or puts it between braces of its own.
_TWICE = ('\\"key\\"', '{{"key"')


class ChatTemplate:
    """A tokenizer's chat template. Whatever day it is, it writes the same: a run has one date."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", date: str = ""):
        """Take the template of a tokenizer.

        Args:
            date: what it gets where it asks for the time, as year-month-day; today's if empty.
        """
        self.tokenizer, self.date = tokenizer, date or today()
        template = getattr(tokenizer, "chat_template", None) or ""
        self.source = template if isinstance(template, str) else "\n".join(template.values())  # several, by name
        self.asks_for_date = _NOW in self.source
        moment = datetime.datetime.fromisoformat(self.date)
        self._words = {mark: moment.strftime(mark) for mark in _MARKS.findall(self.source)}
        self._tools: list[dict] = []

    @property
    def written_date(self) -> str:
        """Return the date that it writes; empty if it writes none."""
        return self.date if self.asks_for_date else ""

    @property
    def identity(self) -> tuple[str, str]:
        """Return what decides about texts that it writes."""
        return self.source, self.written_date

    def with_tools(self, value: Any, where: Callable[[], str]) -> "ChatTemplate":
        """Return the template for a row that has this in its column of tools.

        Args:
            where: names the row in errors.

        Raises:
            UserError: these are no tools, or the template does not write any.
        """
        tools = tools_of(value, where)
        if not tools:
            return self
        if TOOLS not in self.source:
            raise UserError(
                f"{where()} has functions in the column {TOOLS}, and the chat template of --model writes none: use a "
                "model whose template does, or take the column out of the data"
            )
        self.wants_objects  # noqa: B018  # found once, and not for each row
        made = copy.copy(self)
        made._tools = tools
        return made

    @cached_property
    def wants_objects(self) -> bool:
        """Tell whether the template makes something else of arguments that are json in a text."""
        try:
            text = self._written(_CALL)
        except Exception:  # of any type: a template is a program
            return True
        return any(sign in text for sign in _TWICE)

    def write(self, messages: list[dict], where: Callable[[], str], flag: str = FLAG, **options: Any) -> str:
        """Write messages.

        Args:
            where: names the row in errors.
            flag: the one that names the column.
            options: of transformers' apply_chat_template.

        Raises:
            UserError: the template refuses them.
        """
        from jinja2 import TemplateError

        if any("tool_calls" in message for message in messages) and self.wants_objects:
            messages = [with_objects(message) for message in messages]
        try:
            return self._written(messages, **options)
        except (TemplateError, *_FAULTS) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise UserError(
                f"{flag}: the chat template of --model refuses {where()}, whose roles are {roles}: {kind}{error}; "
                "change the row, or leave it out of the data"
            ) from None

    def _written(self, messages: list[dict], **options: Any) -> str:
        if self._tools:
            options |= {"tools": self._tools}
        if self.asks_for_date:
            options |= {
                # As transformers chooses it: one of several is for tools.
                "chat_template": _OWN_NOW + self.tokenizer.get_chat_template(tools=self._tools or None),
                "date_of_the_run": self._words,
            }
        return cast(str, self.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def write_whole(self, messages: list[dict], where: Callable[[], str], flag: str = FLAG) -> str:
        """Write a conversation, and make sure that every message is in the text.

        Raises:
            UserError: the template refuses them, or leaves out what one of them says.
        """
        whole = self.write(messages, where, flag)
        seen, place = set(), 0
        for turn, message in enumerate(messages):
            said, calls = (message["content"] or "").strip(), "tool_calls" in message
            start = whole.find(said, place)
            place = place if start < 0 else start + len(said)
            # What a template leaves out, it leaves out of every message of a role. Short texts are found by chance.
            if start < 0 or calls or (said and message["role"] not in seen):
                self._check_written(messages, turn, whole, where, flag)
            seen |= {message["role"]}
            if thought := next((key for key in THOUGHTS if message.get(key) and key not in self.source), ""):
                raise UserError(
                    f"{flag}: message {turn} of {where()} has {thought}, which the chat template of --model does not "
                    "write: write it into the content, as the model marks its thoughts, or take the key out of the data"
                )
        return whole

    def _check_written(self, messages: list[dict], turn: int, whole: str, where: Callable[[], str], flag: str) -> None:
        """Raise a UserError if the text stays the same where a message says something else."""
        message = messages[turn]
        others = {"its text": {**message, "content": f"{message['content']} x"}} if message["content"] else {}
        if "tool_calls" in message:
            others["its tool_calls"] = {key: value for key, value in message.items() if key != "tool_calls"}
        for what, other in others.items():
            try:
                text = self.write([*messages[:turn], other, *messages[turn + 1 :]], where, flag)
            except UserError:  # so it looks at it
                continue
            if text == whole:
                raise UserError(
                    f"{flag}: the chat template of --model leaves out message {turn} of {where()} ({what}), whose role "
                    f"is {message['role']}: take such messages out of the data, or use a template that writes them"
                )
