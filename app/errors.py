"""The one kind of error that is the user's to mend."""


class UserError(Exception):
    """Tell the user what to change: its message names the field, the value and the fix.

    A command-line program shows it once, without a traceback, and exits with status 2.
    """
