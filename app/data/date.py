"""The date of a run: what texts get that are written with today's date."""

import datetime

from app.errors import UserError


def today() -> str:
    """Return today's date, as --data.date takes it."""
    return datetime.date.today().isoformat()


def in_words(date: str) -> str:
    """Say that a chat template writes a date, for the first lines of a run."""
    return f"the chat template writes a date: {date} (--data.date)"


def check_date(date: str) -> None:
    """Raise a UserError if --data.date is no date."""
    try:
        datetime.date.fromisoformat(date or today())
    except ValueError:
        raise UserError(f"--data.date {date}: give a date as year-month-day, such as {today()}") from None
