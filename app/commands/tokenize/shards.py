"""Shards of tokens: each is a pure function of a part of the source, and is written whole or not at all."""

import contextlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from app import storage
from app.commands.tokenize.sources import Source
from app.data.config import CorpusData
from app.data.corpus.chat_template import ChatTemplate
from app.data.corpus.encode import encoded
from app.data.corpus.token_shards import Amount, Listed, Settings, ShardWriter, read_in_shard
from app.errors import UserError
from app.sampling.hashing import key_of
from app.storage import Storage
from app.storage.drafts import flush

MOST = 10**5  # shards; their names have five digits
SAMPLED = 1000  # rows by whose tokens the parts of the source are chosen


class _Nothing(Exception):
    """A part of the source has no token."""


@dataclass(frozen=True)
class Job:
    """All that makes the shards of one split; it goes to other processes as it is."""

    out: str
    split: str
    settings: Settings
    config: CorpusData
    template: ChatTemplate
    source: Source

    def parts(self) -> list[range]:
        """Cut the source into parts, of each of which a shard is made.

        Raises:
            UserError: there are too many, or one of the first rows cannot be tokenized.
        """
        parts = self.source.parts(self._rows_of_a_shard())
        if len(parts) > MOST:
            raise UserError(
                f"--tokens-per-shard {self.settings.shard}: there would be {len(parts):,} shards, and {MOST:,} are too "
                "many: give more tokens a shard"
            )
        return parts

    def _rows_of_a_shard(self) -> int:
        """Return how many rows have the tokens of a shard, about, by the first ones."""
        sampled = tokens = 0
        for table, rows in self.source.tables(self.source.everything()):
            some = rows[: SAMPLED - sampled]
            sampled += len(some)
            tokens += sum(len(each.tokens) for each in encoded(table, some, self.config, self.template))
            if sampled >= SAMPLED:
                break
        return max(1, round(self.settings.shard * sampled / max(tokens, 1)))

    def name(self, number: int) -> str:
        """Return the name of a shard."""
        return f"{self.split}-{number:05}.parquet"

    def make(self, number: int, part: range) -> Listed | None:
        """Write a shard, unless it is there; return none if the part has no token.

        Raises:
            UserError: a row cannot be tokenized, or the shard cannot be written.
        """
        files, name = storage.at(self.out), self.name(number)
        settings = replace(self.settings, source="", tokenizer="")  # however they were written
        made = key_of(json.dumps(settings.to_json(), sort_keys=True), number, part.start, part.stop)
        try:
            if there := _there(files, name, made):
                return there
            for left in files.drafts(name):  # by a command that was killed
                files.delete(left)
            with files.drafted(name) as draft:
                amount = self._write(draft, part, made)
                flush(draft)
                size = draft.stat().st_size
            return Listed(name, size, amount)
        except _Nothing:
            return None
        except OSError as error:
            raise UserError(
                f"OUT {self.out}: {name} cannot be written ({_why(error)}): make room or mend it, and run the same "
                "command again, which goes on where it stopped"
            ) from error

    def _write(self, file: Path, part: range, made: str) -> Amount:
        writer = ShardWriter(file, self.settings.meaning, self.settings.chunk)
        documents = unlearnt = size = 0
        try:
            for table, rows in self.source.tables(part):
                for some in encoded(table, rows, self.config, self.template):
                    writer.add(some.tokens)
                    documents += int(some.tokens.begins.sum())
                    unlearnt, size = unlearnt + some.unlearnt, size + some.bytes
            amount = writer.close(made, documents, unlearnt, size)
        except BaseException:
            writer.abandon()
            raise
        if not amount.tokens:
            raise _Nothing
        return amount


def _why(error: OSError) -> str:
    """Say what the system says; Arrow has the number of its error in a text."""
    number = re.search(r"\[errno (\d+)\]", str(error))
    return os.strerror(int(number[1])) if number else error.strerror or str(error)


def _there(files: Storage, name: str, made: str) -> Listed | None:
    """Return the shard that an earlier command with the same settings has written; none if it is not whole."""
    entry = files.entry(name)
    if entry is None:
        return None
    with contextlib.suppress(ValueError, OSError), files.open(name) as file:
        record = read_in_shard(file)
        if record.made == made:
            return Listed(name, entry.size, record.amount)
    return None
