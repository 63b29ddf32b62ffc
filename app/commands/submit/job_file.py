"""Job files: a template with its {{words}} filled in, and how a user's words stand in a script or in YAML."""

import math
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import yaml

from app.errors import UserError, did_you_mean, printable

TEMPLATES = Path(__file__).parent / "templates"
FOLDER = Path("jobs")
_WORD = re.compile(r"\{\{ *(\w+) *\}\}")
_ALONE = re.compile(r"^( *)\{\{ *(\w+) *\}\}$", re.MULTILINE)
_MARK = "# Written by `submit` for the run "


def in_shell(words: list[str]) -> str:
    r"""Write words for bash, each quoted where it must be.

    What does not print stands as bytes, `$'\x0a'`: so each word is on one line, and means the same in every locale.
    """
    return " ".join(shlex.quote(word) if word.isprintable() else _bytes_in_shell(word) for word in words)


def _bytes_in_shell(word: str) -> str:
    parts = []
    for letter in word:
        if letter in "\\'":
            parts.append(f"\\{letter}")
        elif letter.isprintable():
            parts.append(letter)
        else:
            # Octal: of hexadecimal digits, bash 5.2 reads two, and older ones have read more.
            parts += [f"\\{byte:03o}" for byte in letter.encode()]
    return f"$'{''.join(parts)}'"


def in_yaml(word: str) -> str:
    """Write a word for YAML, in double quotes, on one line."""
    return yaml.safe_dump(word, default_style='"', width=math.inf).strip()


def list_in_yaml(words: list[str]) -> str:
    """Write a list for YAML, one word a line."""
    return "\n".join(f"- {in_yaml(word)}" for word in words)


def filled(template: Path, fields: NamedTuple) -> str:
    """Return the text of a template with each `{{word}}` replaced by the field of that name.

    A word that is alone on its line may stand for several lines, which get its indent, or for none.

    Raises:
        UserError: the template cannot be read, or has a word that is no field.
    """
    try:
        text = template.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--template {template}: {getattr(error, 'strerror', None) or 'not a text in UTF-8'}") from None
    values = {name: str(value) for name, value in fields._asdict().items()}
    for name in _WORD.findall(text):
        if name not in values:
            known = ", ".join(values)
            meant = did_you_mean(name, values)
            raise UserError(f"--template {template}: {{{{{name}}}}} is not known; there are {known}{meant}")
    # In one pass: what is filled in is not looked at again.
    pattern = re.compile(f"{_ALONE.pattern}\n?|{_WORD.pattern}", re.MULTILINE)

    def value(match: re.Match) -> str:
        indent, alone, inside = match.groups()
        if inside:
            return values[inside]
        return "".join(f"{indent}{line}\n" for line in values[alone].split("\n") if line)

    return pattern.sub(value, text)


def write(text: str, name: str, run: str) -> Path:
    """Write a job file into the folder jobs/ here, and return its path.

    A line in it says whose it is; it is put behind the first line, which may be for the system (`#!`).

    Raises:
        UserError: there is a file of that name that is not this run's, or it cannot be written.
    """
    file, mark = FOLDER / name, f"{_MARK}{printable(run)}"
    first, _, rest = text.partition("\n")
    try:
        if file.exists() and mark not in file.read_text(encoding="utf-8", errors="replace").splitlines():
            raise UserError(f"{file} is there and is not a job of the run {printable(run)}: give another --name")
        FOLDER.mkdir(exist_ok=True)
        file.write_text(f"{first}\n{mark}\n{rest}", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file}: cannot be written: {error.strerror}") from None
    return file
