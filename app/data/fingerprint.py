"""The contents of a data set in a few kilobytes: digests of some of its rows, whatever its size."""

import copy
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from app.data.rows import Digested, Rows, Sharded, read_rows
from app.sampling.hashing import hash_of
from app.sampling.permutation import permute
from app.sampling.seeding import aside

ROWS = 64
# Reading ends after these seconds; the rows that both launches have read are compared.
SECONDS = 20.0
# A tuple or list of at most so many items is a row of fields, as a dict is; a longer one is a single value.
FIELDS = 32


def contents(data: Rows) -> dict[str, Any]:
    """Digest some rows of a data set, chosen by its size alone, and read its own fingerprint.

    The same data give the same result on every machine. Reading neither draws from the process's random generators
    nor changes `data`.

    Returns:
        "own": the data set's `fingerprint`, if it has one: a hash of all of its contents, and of no path or time. (That
        of `datasets.Dataset` does not count, because it depends on the times of cache files.)
        "rows": the digests of the fields of each row that was read, by the row's number.
        "random": the fields that differ between two readings.
        "shards": the hashes of the files that the data set is read from, if it knows them: see Sharded.
        "models": the hashes of further models that belong to the data, such as a teacher, by their names in words: what
            the data set gives as `models`, a dict.
    """
    data = _apart(data, {})
    read: dict[str, dict[str, str]] = {}
    unstable: set[str] = set()
    end = time.monotonic() + SECONDS
    with aside(torch.device("cpu")):
        for row in data.digested if isinstance(data, Digested) else places(len(data)):
            read[str(row)], again = (dict(_digests(*read_rows(data, [row]))) for _ in range(2))
            unstable |= _fields(read[str(row)], again)
            if time.monotonic() > end:
                break
    fingerprint, models = getattr(data, "fingerprint", None), getattr(data, "models", None)
    return {
        "own": fingerprint if isinstance(fingerprint, str) else None,
        "random": sorted(unstable),
        "rows": read,
        "shards": data.shard_hashes() if isinstance(data, Sharded) else {},
        "models": dict(models) if isinstance(models, dict) else {},
    }


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Say how the contents of two data sets of the same size differ; return nothing if they do not."""
    ignored = {*before["random"], *now["random"]}
    rows = [row for row in before["rows"] if row in now["rows"]]
    fields_by_row = {row: _fields(before["rows"][row], now["rows"][row]) - ignored for row in rows}
    changed = {row: fields for row, fields in fields_by_row.items() if fields}
    if changed:
        names = ", ".join(sorted(set.union(*changed.values()) - {""}))
        inside = f" in {names}" if names else ""
        first = min(changed, key=int)
        return f"{len(changed)} of {len(rows)} rows that were compared differ{inside}; the first is row {first}"
    # The fingerprint of data may include a model's.
    if before["own"] and now["own"] and before["own"] != now["own"] and not other_models(before, now):
        return changed_shard(before, now) or f"the hash of all rows was {before['own']}, now it is {now['own']}"
    return ""


def changed_shard(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Name the first file that the contents of two data sets differ in, and say how; nothing if none is known."""
    old, new = before.get("shards", {}), now.get("shards", {})
    if not (old and new):
        return ""
    names = [*old, *(name for name in new if name not in old)]
    first = next((name for name in names if old.get(name) != new.get(name)), "")
    if "one of " in first:
        return f"{first} is another one"
    return first and f"{first} {'is gone' if first not in new else 'has changed' if first in old else 'is new'}"


def other_models(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Name the models that belong to two data sets and have other contents in one of them than in the other."""
    models, others = before["models"], now["models"]
    return [name for name in models if name in others and models[name] != others[name]]


def _fields(before: dict[str, str], now: dict[str, str]) -> set[str]:
    """Return the names of a row's fields that differ."""
    return {name for name in {**before, **now} if before.get(name) != now.get(name)}


def places(size: int) -> list[int]:
    """Choose rows of a data set of some size: the first, the last, and others from all over it."""
    chosen = permute(np.arange(min(size, ROWS - 2)), size, 0, 0)
    return sorted({0, size - 1, *chosen.tolist()})


def _apart(value: Any, seen: dict[int, Any]) -> Any:
    """Copy a data set but not its data, so that the original keeps its own generators, open files and counters.

    Loading processes are forked later: they must not inherit a file that is opened here.
    """
    if id(value) in seen:
        return seen[id(value)]
    made: Any
    if isinstance(value, random.Random | np.random.Generator | np.random.RandomState | torch.Generator):
        made = value.clone_state() if isinstance(value, torch.Generator) else copy.deepcopy(value)
    elif type(value) in (list, tuple) and len(value) <= FIELDS:
        made = type(value)(_apart(item, seen) for item in value)
    elif type(value) is dict and len(value) <= FIELDS:
        made = {key: _apart(item, seen) for key, item in value.items()}
    else:
        return _copied(value, seen)
    seen[id(value)] = made
    return made


def _copied(value: Any, seen: dict[int, Any]) -> Any:
    shared = isinstance(value, type | ModuleType | FunctionType | MethodType | torch.Tensor)
    if shared or not isinstance(getattr(value, "__dict__", None), dict):
        return value
    try:
        made = copy.copy(value)
        seen[id(value)] = made
        vars(made).update({name: _apart(item, seen) for name, item in vars(value).items()})
    except Exception:  # a value that cannot be copied is used as it is
        seen[id(value)] = value
    return seen[id(value)]


def _digests(row: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each field of a row; a row that is no collection is one field without a name."""
    if isinstance(row, Mapping):
        fields: Iterable[tuple[Any, Any]] = row.items()
    elif isinstance(row, tuple | list) and len(row) <= FIELDS:
        fields = enumerate(row)
    else:
        fields = [("", row)]
    for name, value in fields:
        yield str(name), hash_of(value)
