"""OUT: what is there already, and what is said there before the shards are made and after it."""

import json
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app import storage
from app.commands.tokenize.tokenizer import loaded
from app.data.corpus.token_shards import (
    SPLITS,
    TOKENIZER,
    Listed,
    Meaning,
    Settings,
    TokensRecord,
    read_record,
    record_name,
)
from app.data.folders import is_hidden
from app.data.text.encoding import lasting_identity
from app.errors import UserError
from app.storage import DRAFT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Out:
    """The folder or URL that gets the shards of a split."""

    def __init__(self, given: str, split: str):
        """Take OUT as it was given."""
        self.given, self.split = given, split
        self.path = os.path.expanduser(given)
        self._files = storage.at(self.path)

    def records(self) -> dict[str, TokensRecord]:
        """Return the records that are there, by their splits.

        Raises:
            UserError: it holds something else.
        """
        of_ours = "|".join(f"{re.escape(record_name(split))}({DRAFT})?" for split in SPLITS)
        try:
            names = [each.name for each in self._files.entries()]
        except FileNotFoundError:
            names = []
        except OSError as error:
            raise self._not_writable(error) from None
        there = [split for split in SPLITS if record_name(split) in names]
        foreign = [name for name in names if not is_hidden(name) and not re.fullmatch(of_ours, name)]
        if foreign and not there:
            raise UserError(
                f"OUT {self.given} holds something else ({foreign[0]}): give a folder that is new, empty, or of the "
                "same command"
            )
        return {split: read_record("OUT", self.given, split) for split in there}

    def tokenizer_folder(self) -> str:
        """Bring the tokenizer that is there to this machine, and return its folder."""
        return str(self._files.down(TOKENIZER))

    def begin(self, records: dict[str, TokensRecord], settings: Settings, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Say what will be there, before anything is, and write the tokenizer.

        Raises:
            UserError: `records`, which are there, are of other settings; or it cannot be written.
        """
        for split, record in records.items():
            self._check_same(split, record.settings, settings)
        try:
            self._files.make()
            if self.split not in records:
                self._files.put_if_absent(record_name(self.split), _json(TokensRecord(settings)))
            if not self._has_tokenizer(settings.meaning.tokenizer):
                self._files.delete(TOKENIZER)  # one that was not written to its end
                with self._files.drafted(TOKENIZER) as draft:
                    tokenizer.save_pretrained(draft)
        except FileExistsError:
            raise UserError(f"OUT {self.given}: another command has begun there just now: let it end") from None
        except OSError as error:
            raise self._not_writable(error) from error

    def finish(self, settings: Settings, shards: Sequence[Listed]) -> None:
        """Say that all shards are there.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self._files.write(record_name(self.split), _json(TokensRecord(settings, list(shards))), durable=True)
        except OSError as error:
            raise self._not_writable(error) from error

    def _check_same(self, split: str, before: Settings, now: Settings) -> None:
        """Refuse settings other than a split was begun with; of another split, only the tokens must mean the same."""
        told = [
            ("SOURCE or its contents", before.rows, now.rows),
            ("the tokenizer", before.meaning.tokenizer, now.meaning.tokenizer),
            ("the chat template", before.template, now.template),
            ("--data.date", before.date, now.date),
            ("what is learnt (--data.text, --data.prompt, --data.messages)", before.meaning.kind, now.meaning.kind),
            ("the columns", before.meaning.columns, now.meaning.columns),
            ("the marks of documents", _marks(before.meaning), _marks(now.meaning)),
            ("--tokens-per-shard", before.shard, now.shard),
            ("--tokens-per-chunk", before.chunk, now.chunk),
        ]
        own = ("SOURCE or its contents", "--data.date", "the columns", "--tokens-per-shard", "--tokens-per-chunk")
        if split != self.split:
            told = [each for each in told if each[0] not in own]
        if different := [what for what, old, new in told if old != new]:
            how = f"; it was begun with SOURCE {before.source} and the tokenizer {before.tokenizer}"
            raise UserError(
                f"OUT {self.given} has the split {split} with other settings: {', '.join(different)} differ{how}: "
                "repeat that command, or give another folder"
            )

    def _has_tokenizer(self, identity: str) -> bool:
        try:
            return self._files.is_folder(TOKENIZER) and lasting_identity(loaded(self.tokenizer_folder())) == identity
        except UserError:
            return False

    def _not_writable(self, error: OSError) -> UserError:
        return UserError(
            f"OUT {self.given} cannot be used ({error.strerror or error}): give a folder or a URL that can be written"
        )


def _marks(meaning: Meaning) -> tuple[int, int, int]:
    return meaning.vocabulary, meaning.start, meaning.end


def _json(record: TokensRecord) -> bytes:
    return (json.dumps(record.to_json(), indent=1) + "\n").encode()
