"""The card of a data set, README.md: which files it says are of which split."""

import re
from collections.abc import Mapping
from posixpath import normpath
from typing import Any, NamedTuple

NAME = "README.md"
HEAD = re.compile(r"---\s*\n(.*?)\n---", re.DOTALL)


class Configuration(NamedTuple):
    """A part of a data set that is read by itself."""

    name: str
    patterns: dict[str, list[str]]
    """Of the files of each split; empty: their names say it."""
    is_default: bool
    """Whether it is the one that is read where none is named."""


def configurations(card: str) -> list[Configuration]:
    """Return the configurations that a card describes, as datasets reads them; none if it describes none.

    Raises:
        ValueError: its head is no YAML, or holds something else there.
    """
    import yaml

    head = HEAD.match(card)
    try:
        about = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError as error:
        raise ValueError(f"its head is no YAML: {' '.join(str(error).split())}") from None
    listed = about.get("configs") if isinstance(about, dict) else None
    if not isinstance(listed, list):
        return []
    if wrong := next((each for each in listed if not isinstance(each, dict)), None):
        raise ValueError(f"one of its configs is {wrong!r}, no names with values")
    return [
        Configuration(name := str(each.get("config_name", "")), _patterns(each), _is_default(each, name, len(listed)))
        for each in listed
    ]


def _is_default(config: Mapping[str, Any], name: str, count: int) -> bool:
    return count == 1 or name == "default" or bool(config.get("default"))


def configuration_of(card: str, name: str) -> Configuration | None:
    """Return the configuration of a name, or the default one if it is empty; None if there is none.

    Raises:
        ValueError: see `configurations`.
    """
    described = configurations(card)
    return next((each for each in described if (each.name == name if name else each.is_default)), None)


def _patterns(config: Mapping[str, Any]) -> dict[str, list[str]]:
    files, folder = config.get("data_files"), config.get("data_dir")
    if files is None:
        return {"": [normpath(f"{folder}/**")]} if folder else {}
    if isinstance(files, list) and all(isinstance(each, dict) for each in files):
        files = {str(each.get("split")): each.get("path") for each in files}
    by_split = files if isinstance(files, dict) else {"train": files}
    listed = {split: paths if isinstance(paths, list) else [paths] for split, paths in by_split.items()}
    base = f"{folder}/" if folder else ""
    return {str(split): [normpath(f"{base}{path}") for path in paths] for split, paths in listed.items()}
