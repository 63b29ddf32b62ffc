"""From which files a path and a split are read, so that none is both trained on and evaluated on."""

import os
from collections.abc import Iterable

from app.data.folders import files_below, splits_by_name
from app.data.patterns import divided, files_of
from app.data.streams.shards import Shard, is_url, real_place, survey
from app.data.tables.files import READERS, extension
from app.data.tables.splits import EVAL_SPLITS, kind_of, names_in
from app.errors import UserError


def places_read(path: str, split: str) -> frozenset[str]:
    """Return the real paths or URLs of the files of tables that a path and a split are read from.

    Args:
        split: or slices of several; empty: what is evaluated on where nothing else is said, a split of its own or all.
    """
    path = os.path.expanduser(path)
    if is_url(path):
        try:
            surveyed = survey("", path)
        except UserError:  # which is said where it is read
            return frozenset()
        by_split = {name: [shard.name for shard in shards] for name, shards in surveyed.by_split.items()}
        named = [shard.name for shard in surveyed.files] or _of_split(by_split, split)
        return frozenset(real_place(f"{surveyed.folder}/{name}") for name in named)
    if not os.path.isdir(path) or divided(path).pattern:
        return frozenset(map(real_place, files_of(path)))
    names = ["/".join(parts) for parts in files_below(path)]
    names = [name for name in names if extension(name) in READERS or Shard(name, 0, "").format]
    return frozenset(real_place(os.path.join(path, name)) for name in _of_split(_by_split(names), split))


def _by_split(names: list[str]) -> dict[str, list[str]]:
    kinds = splits_by_name(names)
    by_split: dict[str, list[str]] = {}
    for name in names:
        for kind in kinds[name] or [""]:
            by_split.setdefault(kind, []).append(name)
    unnamed = by_split.pop("", [])
    return {"train": unnamed} | by_split if unnamed else by_split


def _of_split(by_split: dict[str, list[str]], split: str) -> Iterable[str]:
    own = next((kind_of(word) for word in EVAL_SPLITS if kind_of(word) in by_split), "train")
    wanted = {kind_of(name) or name for name in names_in(split)} if split else {own}
    return [name for kind, names in by_split.items() if kind in wanted for name in names]
