"""Reading configurations: flags of the command line and files of flags, both checked by tyro."""

import dataclasses
import functools
import inspect
import re
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import yaml

from app.config import as_flag, check_numbers, each_field, flatten
from app.config.text_files import UNREADABLE, open_text, why
from app.config.yaml_files import AsWritten
from app.errors import UserError, printable
from app.launching import other_names, program
from app.launching.dropped_output import outlive_readers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def parse(config_class: type[T], args: list[str] | None = None) -> T:
    """Read a config from the command line. From here on, a UserError ends the program with one message and status 2.

    `--config FILE` names a YAML file of flags, which are put before those of the command line.
    """
    from app.distributed.environment import leave_with_launcher, report_user_errors

    outlive_readers()
    leave_with_launcher()
    report_user_errors()
    words = list(sys.argv[1:] if args is None else args)
    check_letters(words)
    recipe = (sys.modules[config_class.__module__].__doc__ or config_class.__doc__ or "").strip()
    words = _expand_file(words)
    other_names.check(config_class, words)
    return _read(config_class, words, f"{recipe}\n\n{_ABOUT_FILES}")


def check_letters(words: list[str]) -> None:
    """Refuse words with bytes that are no letters in the encoding of this process: no library could name such files.

    Raises:
        UserError: there is one; the message says how to change the encoding.
    """
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise UserError(
                f"{word}: this is no name in {sys.getfilesystemencoding()}, the encoding of this process: set "
                "PYTHONUTF8=1, or a locale such as LC_ALL=C.UTF-8; or rename the file"
            )


def parse_command(options_class: type[T], words: list[str], name: str, rest: bool) -> tuple[T, list[str]]:
    """Read a command's options; return them, and the words that are not among them.

    Args:
        name: the command as it is typed.
        rest: whether other words are allowed, as flags of a recipe.
    """
    about = program.as_typed(sys.modules[options_class.__module__].__doc__ or "").strip()
    switches = {as_flag(field.name) for field in dataclasses.fields(options_class) if field.type is bool}
    followed = zip(words, [*words[1:], ""], strict=False)
    words = [part for w, n in followed for part in ([w, "true"] if w in switches and not _is_boolean(n) else [w])]
    own_words, others = _divided(options_class, words) if rest else (words, [])
    _name_positionals(options_class)
    options = _read(options_class, own_words, about, prog=name)
    check_numbers(options)
    _check_lists(options, own_words)
    return options, others


def _check_lists(options: Any, words: list[str]) -> None:
    """Refuse an option that takes a list and is given without anything in it, which asks for nothing.

    Raises:
        UserError: it names the option.
    """
    flags = {word.partition("=")[0].replace("_", "-") for word in words}
    for name, _, value in each_field(options):
        if value == () and as_flag(name) in flags:
            raise UserError(f"{as_flag(name)}: give at least one after it, or leave it out")


def _divided(options_class: type["DataclassInstance"], words: list[str]) -> tuple[list[str], list[str]]:
    """Divide words into a command's own and the flags of a recipe with their values.

    tyro's own way (return_unknown_args, tyro 1.0.17) takes a positional argument that is left out for `[]`.
    """
    own_flags = {"--help", *(as_flag(field.name) for field in dataclasses.fields(options_class))}
    divided: tuple[list[str], list[str]] = ([], [])
    foreign = False
    for word in words:
        if word.startswith("--"):
            foreign = word.partition("=")[0].replace("_", "-") not in own_flags
        divided[foreign].append(word)
    return divided


def _name_positionals(options_class: type["DataclassInstance"]) -> None:
    """Have tyro show each positional argument by its name, as RUN or DATA, and not by its type."""
    import tyro

    for kind in options_class.__mro__:
        for field_name, hint in vars(kind).get("__annotations__", {}).items():
            marks = getattr(hint, "__metadata__", ())
            if tyro.conf.Positional in marks and not any(hasattr(mark, "metavar") for mark in marks):
                shown = f"[{field_name.upper()}]" if field_name in vars(kind) else field_name.upper()
                kind.__annotations__[field_name] = Annotated[hint, tyro.conf.arg(metavar=shown)]


# tyro does not know the flag.
_COMMAND = "--run.notice"  # the flag that a shell reads
_ABOUT_FILES = "--config FILE reads flags from a YAML file, such as a run's config.yaml, before these."


def _read(config_class: type[T], words: list[str], description: str, **options: Any) -> Any:
    import tyro

    from app.distributed.environment import is_main_process

    _fill_help(config_class)
    with _booleans():
        return tyro.cli(
            config_class,
            description=description,
            args=words,
            console_outputs=is_main_process(),
            config=(tyro.conf.FlagConversionOff,),
            **options,
        )


@functools.cache  # a class keeps what it was given
def _fill_help(config_class: type) -> None:
    """Give tyro the docstring of each field as paragraphs without line breaks, in dataclasses inside this one too.

    tyro reads a field's help from its metadata first. From the docstring itself, tyro 1.0 keeps the line breaks before
    lines that do not begin with a letter.
    """
    import docstring_parser

    texts: dict[str, str] = {}
    for kind in reversed(config_class.__mro__[:-1]):
        params = docstring_parser.parse_from_object(kind).params
        texts |= {param.arg_name: param.description for param in params if param.description}
    for field in dataclasses.fields(config_class):
        if field.name in texts and "help" not in field.metadata:
            text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(texts[field.name]))
            field.metadata = MappingProxyType({**field.metadata, "help": text})
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            _fill_help(field.type)


def _booleans():
    """Have tyro accept true and false in upper and lower case, as YAML does."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        if info.type is not bool:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{true,false}",
            instance_from_str=lambda words: _boolean(words[0]),
            is_instance=lambda value: isinstance(value, bool),
            str_from_instance=lambda value: [str(value).lower()],
        )

    return registry


def _is_boolean(word: str) -> bool:
    return word.lower() in ("true", "false")


def _boolean(word: str) -> bool:
    if not _is_boolean(word):
        raise ValueError(f"{word} is neither true nor false")
    return word.lower() == "true"


def _expand_file(words: list[str]) -> list[str]:
    """Put the flags of `--config FILE` before the other words."""
    flags, rest, position = [], [], 0
    while position < len(words):
        word = words[position]
        if word == "--config":
            if position + 1 == len(words):
                raise UserError("--config: give the file after it, for example --config runs/cls/config.yaml")
            position += 1
            flags += _flags(_read_fields(words[position]))
        elif word.startswith("--config="):
            flags += _flags(_read_fields(word.partition("=")[2]))
        else:
            rest.append(word)
        position += 1
    _check_commands(flags, rest)
    return flags + rest


def _check_commands(of_files: list[str], typed: list[str]) -> None:
    """Refuse a file that names a command to run here, as such a file may be somebody else's.

    Raises:
        UserError: it does, and the command line says nothing of it.
    """
    words = [word for word in of_files if word != f"{_COMMAND}=" and _name_of(word) == _COMMAND]  # items of lists too
    if words and _COMMAND not in map(_name_of, typed):
        raise UserError(
            f"--config: the file has a command, {printable(words[-1])}, and no command of a file is run: give "
            f"{_COMMAND} on the command line too, or {_COMMAND}= to run none"
        )


def _name_of(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def _read_fields(path: str) -> dict:
    loaded = read_yaml("--config", path, loader=AsWritten)  # flags take words: `no` may be a class
    if not isinstance(loaded or {}, dict):
        raise UserError(f"--config {path}: expected fields with values, found {type(loaded).__name__}")
    return loaded or {}


def read_yaml(flag: str, path: str, advice: str = "", loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Read the YAML file that a flag names.

    Args:
        advice: what to do if it cannot be read; ends the message.
        loader: what its words are.

    Raises:
        UserError: it cannot be read, or is not YAML.
    """
    try:
        with open_text(path) as stream:
            return yaml.load(stream.read(), loader)
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror or error}{advice}") from None
    except (yaml.YAMLError, *UNREADABLE, RecursionError) as error:
        raise UserError(f"{flag} {path} is not YAML: {why(error)}") from None


def _flags(fields: dict) -> list[str]:
    words = []
    for name, value in flatten(fields).items():
        flag = as_flag(name)
        if isinstance(value, list):
            words += [flag, *(str(item) for item in value)]
        elif value is not None:
            words.append(f"{flag}={value}")  # the value may begin with a minus sign
    return words
