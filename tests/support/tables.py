"""What the tests of data share: tables in memory, their labels, refusals, and processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from app.data.config import TableData, TextData
from app.data.loading import load_tables
from app.data.tables.labels import read_labels
from app.errors import UserError


def table(**columns):
    """Make a table in memory."""
    return datasets.Dataset.from_dict(columns)


def load(path="builtin:stdlib", **flags):
    """Load the tables to train and to evaluate on, as the flags of --data say."""
    paths = (str(path),) if isinstance(path, str | Path) else tuple(map(str, path))
    tables = load_tables(TableData(path=paths, **flags))
    return tables.train, tables.evaluation


def refused(*words):
    """Expect a UserError whose message has all the words."""
    return pytest.raises(UserError, match="(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words))


def python(code: str, **env: str) -> str:
    """Run code in a process of its own, as a session of its own would."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def labels_of(train, evaluation=None, label=("label",), problem="auto", classes=()):
    """Read the labels of a table, and of itself where there is no other to evaluate on."""
    config = TextData(label=label, problem=problem, classes=classes)
    return read_labels(train, train if evaluation is None else evaluation, config)


def texts_of(tables) -> list[str]:
    """Return the texts of several tables, sorted."""
    return sorted(text for part in tables for text in part["text"])


def write_card(folder: Path, options: str = "") -> Path:
    """Write a folder with a card, whose two configurations hold a jsonl file each; return that of the first."""
    configs = ""
    for name in ("one", "two"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rows.jsonl").write_text(
            "".join(f'{{"text": "{name} {i}", "label": {i % 2}}}\n' for i in range(9))
        )
        configs += f"- config_name: {name}\n  data_files: {name}/rows.jsonl\n{options}"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n# Rows\n")
    return folder / "one" / "rows.jsonl"
