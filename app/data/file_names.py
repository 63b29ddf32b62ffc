"""Which file names in a folder of data mean rows, and which mean table logs, notes or unfinished files."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

# Folders in which a program keeps which files of a table count; others are deleted rows, old versions, or unfinished.
LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Apache Hudi", "_spark_metadata": "Spark's streaming"}
ICEBERG = re.compile(r"(.*/)?metadata/[^/]*\.metadata\.json")
TABLES = {".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".tar", ".arrow", ".feather", ".orc", ".avro"}
PACKERS = {".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".snappy", ".br", ".7z"}
WHOLE = {".tgz", ".tbz2", ".txz"}
UNFINISHED = {".tmp", ".temp", ".part", ".partial", ".inprogress", ".incomplete", ".crdownload", ".filepart"}
READMES = ("readme", "license", "licence", "changelog", "citation")
# Files of JSON that tell of other files.
TOLD = {"dataset_info", "dataset_infos", "dataset_dict", "config", "state", "index", "manifest", "metadata", "stats"}


def log_among(names: Iterable[str]) -> str:
    """Say which of some paths tells which files of a table count, and what to do; nothing if none does.

    Args:
        names: of files, and perhaps of folders, below the folder of the data, with slashes.
    """
    for name in names:
        for part in name.split("/"):
            if part in LOGS:
                return _log(part, LOGS[part])
        if ICEBERG.fullmatch(name):
            return _log(name, "Apache Iceberg")
    return ""


def _log(name: str, program: str) -> str:
    return (
        f"{name} is of {program}, which says there which files of the table still count: export the table to files of "
        "its rows, or, if all files count, name them by a pattern"
    )


def is_readme(name: str) -> bool:
    """Tell whether a file is for people, such as a README."""
    return PurePosixPath(name).name.lower().startswith(READMES)


def looks_like_data(name: str, beside: str) -> bool:
    """Tell whether a file may hold rows, also a compressed one, or one that is not finished.

    Args:
        beside: the format of the files next to it; a plain file of JSON next to parquet or tar tells of them.
    """
    path = PurePosixPath(name.lower())
    if path.suffix == ".json":
        return beside == "jsonl" and path.stem not in TOLD
    while path.suffix in PACKERS | UNFINISHED:
        path = path.with_suffix("")
    return path.suffix in TABLES | WHOLE


def run_folders(names: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of runs that were trained inside a folder of data, each with a slash at its end."""
    return tuple(name.removesuffix("run.json") for name in names if name.endswith("/run.json"))
