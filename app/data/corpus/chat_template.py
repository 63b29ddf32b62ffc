"""A tokenizer's chat template: what it writes for messages, on the date of a run."""

import datetime
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from app.data.corpus.messages import FLAG
from app.data.date import today
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


class ChatTemplate:
    """A tokenizer's chat template. Whatever day it is, it writes the same: a run has one date."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", date: str = ""):
        """Take the template of a tokenizer.

        Args:
            date: what it gets where it asks for the time, as year-month-day; today's if empty.
        """
        self.tokenizer, self.date = tokenizer, date or today()
        found = getattr(tokenizer, "chat_template", None) or ""
        self.source = found if isinstance(found, str) else "\n".join(found.values())  # several, by name
        self.asks_for_date = _NOW in self.source
        moment = datetime.datetime.fromisoformat(self.date)
        self._words = {mark: moment.strftime(mark) for mark in _MARKS.findall(self.source)}

    @property
    def written_date(self) -> str:
        """Return the date that it writes; empty if it writes none."""
        return self.date if self.asks_for_date else ""

    @property
    def identity(self) -> tuple[str, str]:
        """Return what decides about texts that it writes."""
        return self.source, self.written_date

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

        try:
            if self.asks_for_date:
                options |= {
                    "chat_template": _OWN_NOW + self.tokenizer.get_chat_template(),
                    "date_of_the_run": self._words,
                }
            return cast(str, self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except (TemplateError, *_FAULTS) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise UserError(
                f"{flag}: the chat template of --model refuses {where()}, whose roles are {roles}: {kind}{error}; "
                "change the row, or leave it out of the data"
            ) from None

    def write_whole(self, messages: list[dict], where: Callable[[], str], flag: str = FLAG) -> str:
        """Write a conversation, and make sure that every message is in the text.

        Raises:
            UserError: the template refuses them, or leaves out what one of them says.
        """
        whole = self.write(messages, where, flag)
        seen, place = set(), 0
        for turn, message in enumerate(messages):
            said, calls = (message["content"] or "").strip(), "tool_calls" in message
            found = whole.find(said, place)
            place = place if found < 0 else found + len(said)
            # What a template leaves out, it leaves out of every message of a role. Short texts are found by chance.
            if found < 0 or calls or (said and message["role"] not in seen):
                self._check_written(messages, turn, whole, where, flag)
            seen |= {message["role"]}
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
