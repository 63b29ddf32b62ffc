"""Tokenize texts once, into shards that lm trains on: in a folder or a bucket, by several processes, resumable.

    python -m app tokenize texts.jsonl tokens/ --tokenizer Qwen/Qwen3-0.6B
    python -m app tokenize book.txt tokens/ --scratch.tokenizer byte
    python -m app tokenize s3://bucket/texts s3://bucket/tokens --tokenizer Qwen/Qwen3-0.6B --workers 16
    python -m app tokenize dev.jsonl tokens/ --split validation

The same command goes on where it was stopped, whatever stopped it: a shard is there whole or not at all, and its bytes
do not depend on --workers. Readers take the shards once all of them are there. The tokenizer is written next to them,
in tokenizer/; a model from scratch takes it from there, and --model must have the same one. A second split, such as
validation, goes into the same folder, with the same tokenizer.
"""

import json
import os
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from app.config import setting
from app.data.config import CorpusData
from app.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from app.commands.tokenize.shards import Job
    from app.commands.tokenize.sources import Source
    from app.data.corpus.chat_template import ChatTemplate
    from app.data.corpus.token_shards import Listed, Meaning, Settings, TokensRecord
    from app.storage import Storage

LARGEST = 2**32  # tokens of a vocabulary
SECONDS = 5.0  # between two lines of progress, where there is no terminal to draw on
MOST = 10**5  # shards; their names have five digits
SAMPLED = 1000  # rows by whose tokens the parts of the source are chosen


@dataclass
class Texts:
    """Which texts, as flags of lm say it."""

    text: str = "text"
    """Column of the text."""
    prompt: str = ""
    """Column of the prompt, which is read but not learnt; needs --data.completion."""
    completion: str = ""
    """Column of what is learnt to write after the prompt."""
    messages: str = ""
    """Column of conversations, which the tokenizer's chat template writes out."""
    txt: Literal["file", "blank-lines", "line", "table"] = "file"
    """What a document is in txt files: the file, the text between two blank lines, a line, or a row of a table."""
    columns: tuple[str, ...] = ()
    """Names of the columns of a csv or tsv file that has no header line, from left to right. Default: the header."""
    name: str = ""
    """Configuration of a data set that has several. Default: the only one."""
    date: str = ""
    """Date that a chat template writes where it asks for today's, as 2026-11-25. Default: that of the first command."""
    stream: bool = False
    """Read SOURCE by chunks (parquet, jsonl, also .gz and .zst, tar), with no table of it in the cache. URLs always
    are."""


@dataclass
class Scratch:
    """A tokenizer for models from scratch."""

    tokenizer: Literal["none", "bpe", "char", "byte"] = "none"
    """bpe: byte pairs, trained on all texts of SOURCE. char: each character of them is a token. byte: each byte is a
    token. none: --tokenizer names one, or for a further split, OUT has it."""
    vocab: int = setting(4096, at_least=0)
    """Tokens of bpe."""


@dataclass
class Options:
    """The texts, where their tokens go, and the tokenizer."""

    source: Annotated[str, tyro.conf.Positional]
    """Texts: all that --data.path takes, or shards to be read by chunks: a folder, a pattern, or a URL."""
    out: Annotated[str, tyro.conf.Positional]
    """Folder, or URL in a bucket (s3, gs, az), for the shards; new, empty, or of the same command."""
    tokenizer: str = ""
    """Model whose tokenizer to take, a Hub id or a folder, which may hold a tokenizer alone."""
    scratch: Scratch = field(default_factory=Scratch)
    data: Texts = field(default_factory=Texts)
    split: Literal["train", "validation", "test"] = "train"
    """What the shards are for; it begins their names."""
    source_split: str = ""
    """Split of SOURCE, or a slice of one, such as train[:90%]. Default: --split; of a file, all of it."""
    workers: int = setting(0, at_least=0)
    """Processes that tokenize. 0: one for each core."""
    tokens_per_shard: int = setting(2**26, at_least=1)
    """Tokens of a shard, about: a whole number of rows of SOURCE, or of its chunks where it is read by chunks."""
    tokens_per_chunk: int = setting(2**20, at_least=8)
    """Tokens of a row group, about: what is read at a time, and in which blocks of --data.block are cut."""


def main(options: Options) -> int:
    """Tokenize, and return the exit status.

    Raises:
        UserError: SOURCE or the tokenizer cannot be read, or OUT cannot be written or holds something else.
    """
    from app import storage
    from app.commands.tokenize.shards import Job
    from app.commands.tokenize.sources import open_texts
    from app.data.cache import using_cache
    from app.data.corpus.encode import template_of

    files = storage.at(os.path.expanduser(options.out))
    records = _records(options, files)
    config = _config(options, records)
    with using_cache(), _as_tokenizer():
        source = open_texts(options.source, options.source_split or options.split, options.data.stream, config)
        tokenizer, name = _tokenizer(options, records, files, source, config)
        template = template_of(config, tokenizer)
        settings = _settings(options, source, template, name, config)
        _begin(options, files, records, settings, tokenizer)
        job = Job(os.path.expanduser(options.out), options.split, settings, config, template, source)
        parts = source.parts(_rows_of(source, template, config, options.tokens_per_shard))
        if len(parts) > MOST:
            raise UserError(
                f"--tokens-per-shard {options.tokens_per_shard}: there would be {len(parts):,} shards, and {MOST:,} "
                "are too many: give more tokens a shard"
            )
        shards = _go_through(job, parts, options)
    _finish(options, files, settings, shards)
    amounts = [each.amount for each in shards]
    tokens, documents = sum(each.tokens for each in amounts), sum(each.documents for each in amounts)
    print(
        f"{options.out}: {len(shards)} shards of {options.split}, {tokens:,} tokens of {documents:,} documents, "
        f"vocabulary {settings.meaning.vocabulary:,}"
    )
    return 0


def _config(options: Options, records: "dict[str, TokensRecord]") -> CorpusData:
    """Return the options of texts as lm has them."""
    from app.data.config import check_date, today
    from app.data.corpus.encode import columns_of

    texts = options.data
    check_date(texts.date)
    begun = next((record.settings.date for record in records.values()), "")
    names = ("text", "prompt", "completion", "messages", "txt", "columns", "name")
    same = {name: getattr(texts, name) for name in names}
    config = CorpusData(path=(options.source,), **same, date=texts.date or begun or today())
    columns_of(config)  # for its errors
    return config


# What is in OUT


def _records(options: Options, files: "Storage") -> "dict[str, TokensRecord]":
    """Return the records in OUT, by their splits.

    Raises:
        UserError: it holds something else.
    """
    from app.data.corpus.token_shards import SPLITS, read_record, record_name
    from app.data.folders import is_hidden
    from app.storage import DRAFT

    of_ours = "|".join(f"{re.escape(record_name(split))}({DRAFT})?" for split in SPLITS)
    try:
        names = [each.name for each in files.entries()]
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise _not_writable(options, error) from None
    there = [split for split in SPLITS if record_name(split) in names]
    foreign = [name for name in names if not is_hidden(name) and not re.fullmatch(of_ours, name)]
    if foreign and not there:
        raise UserError(
            f"OUT {options.out} holds something else ({foreign[0]}): give a folder that is new, empty, or of the same "
            "command"
        )
    return {split: read_record("OUT", options.out, split) for split in there}


def _not_writable(options: Options, error: OSError) -> UserError:
    return UserError(
        f"OUT {options.out} cannot be used ({error.strerror or error}): give a folder or a URL that can be written"
    )


def _begin(
    options: Options,
    files: "Storage",
    records: "dict[str, TokensRecord]",
    settings: "Settings",
    tokenizer: "PreTrainedTokenizerBase",
) -> None:
    """Say in OUT what will be in it, before anything is, and write the tokenizer.

    Raises:
        UserError: OUT is of other settings, or cannot be written.
    """
    from app.data.corpus.token_shards import TOKENIZER, TokensRecord, record_name

    for split, record in records.items():
        _check_same(options, split, record.settings, settings)
    try:
        files.make()
        if options.split not in records:
            record = TokensRecord(settings)
            files.put_if_absent(record_name(options.split), _json(record))
        if not _has_tokenizer(files, settings.meaning.tokenizer):
            files.delete(TOKENIZER)  # one that was not written to its end
            with files.drafted(TOKENIZER) as draft:
                tokenizer.save_pretrained(draft)
    except FileExistsError:
        raise UserError(f"OUT {options.out}: another command has begun there just now: let it end") from None
    except OSError as error:
        raise _not_writable(options, error) from error


def _check_same(options: Options, split: str, before: "Settings", now: "Settings") -> None:
    """Refuse settings that differ from those with which a split was begun: of another one, only the tokens' meaning."""
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
    if split != options.split:
        told = [each for each in told if each[0] not in own]
    if different := [what for what, old, new in told if old != new]:
        how = f"; it was begun with SOURCE {before.source} and the tokenizer {before.tokenizer}"
        raise UserError(
            f"OUT {options.out} has the split {split} with other settings: {', '.join(different)} differ{how}: repeat "
            "that command, or give another folder"
        )


def _marks(meaning: "Meaning") -> tuple[int, int, int]:
    return meaning.vocabulary, meaning.start, meaning.end


def _has_tokenizer(files: "Storage", identity: str) -> bool:
    from app.data.corpus.token_shards import TOKENIZER
    from app.data.text.labeled_text import lasting_identity

    try:
        return files.is_folder(TOKENIZER) and lasting_identity(_loaded(str(files.down(TOKENIZER)))) == identity
    except UserError:
        return False


def _json(record: "TokensRecord") -> bytes:
    return (json.dumps(record.to_json(), indent=1) + "\n").encode()


def _finish(options: Options, files: "Storage", settings: "Settings", shards: "Sequence[Listed]") -> None:
    """Write that all shards are there.

    Raises:
        UserError: there is no token in them, or OUT cannot be written.
    """
    from app.data.corpus.token_shards import TokensRecord, record_name

    if not shards:
        raise UserError(f"SOURCE {options.source} has no text to learn: all of it is empty")
    try:
        files.write(record_name(options.split), _json(TokensRecord(settings, list(shards))), durable=True)
    except OSError as error:
        raise _not_writable(options, error) from error


# The tokenizer


@contextmanager
def _as_tokenizer() -> "Iterator[None]":
    """Have errors name --tokenizer where recipes have --model."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--model", "--tokenizer")) from error


def _tokenizer(
    options: Options, records: "dict[str, TokensRecord]", files: "Storage", source: "Source", config: CorpusData
) -> "tuple[PreTrainedTokenizerBase, str]":
    """Return the tokenizer, and how it is called: that of OUT for a further split, if no other one is asked for.

    Raises:
        UserError: none or two are asked for, or it cannot be loaded.
    """
    from app.data.corpus.encode import columns_of
    from app.data.corpus.token_shards import TOKENIZER
    from app.data.text.tokenizer import tokenizer_of

    kind, vocab = options.scratch.tokenizer.replace("none", ""), options.scratch.vocab
    others = [record.settings.tokenizer for split, record in records.items() if split != options.split]
    if options.tokenizer and kind:
        raise UserError(f"--tokenizer {options.tokenizer} and --scratch.tokenizer {kind}: give one of the two")
    if options.tokenizer:
        return _loaded(options.tokenizer), options.tokenizer
    name = f"bpe {vocab}" if kind == "bpe" else kind
    if others and name in ("", others[0]):
        return _loaded(str(files.down(TOKENIZER))), others[0]
    if not kind:
        raise UserError("--tokenizer: give a model whose tokenizer to take, or --scratch.tokenizer bpe, char or byte")
    longest = int(1e30)  # of any length, as transformers has it; a model has its own
    key = (source.fingerprint, *columns_of(config))
    return tokenizer_of(kind, vocab, longest, key, source.texts), name


def _loaded(name: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model, or of a folder that holds nothing else."""
    from pathlib import Path

    from transformers import AutoTokenizer

    from app import storage
    from app.data.streams.shards import is_url
    from app.data.text.tokenizer import check_tokenizer
    from app.tasks.pretrained import PARTS, loading

    place = str(storage.at(name).down()) if is_url(name) else os.path.expanduser(name)
    folder = Path(place)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in PARTS["tokenizer"]):
        raise UserError(f"--tokenizer {name}: this folder has no tokenizer, as tokenizer.save_pretrained writes it")
    with loading(place, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    return check_tokenizer(tokenizer, tokenizer.model_max_length, "--tokenizer")


def _settings(
    options: Options, source: "Source", template: "ChatTemplate", name: str, config: CorpusData
) -> "Settings":
    """Return all that decides about the shards.

    Raises:
        UserError: the tokenizer has no end-of-text token, or too many tokens.
    """
    from app.data.corpus.documents import end_of, start_of
    from app.data.corpus.encode import columns_of, kind_of
    from app.data.corpus.token_shards import Meaning, Settings
    from app.data.text.labeled_text import lasting_identity
    from app.sampling.hashing import key_of

    tokenizer = template.tokenizer
    end = end_of(tokenizer)
    if end is None:
        raise UserError(
            f"--tokenizer {name}: it has no end-of-text token, which is needed to end documents; name one as eos_token "
            "in its tokenizer_config.json"
        )
    vocabulary = 1 + max(len(tokenizer) - 1, *tokenizer.get_vocab().values())
    if vocabulary > LARGEST:
        raise UserError(f"--tokenizer {name}: its {vocabulary:,} tokens are too many: 2**32 can be written")
    kind = kind_of(config)
    identity = lasting_identity(tokenizer)
    meaning = Meaning(kind, columns_of(config), identity, vocabulary, start_of(tokenizer), end)
    source_key, written = key_of(source.fingerprint, config.txt), template.written_date if config.messages else ""
    return Settings(
        source=f"{options.source} ({options.source_split})" if options.source_split else options.source,
        rows=source_key,
        tokenizer=name,
        template=key_of(template.source) if config.messages else "",
        date=written,
        shard=options.tokens_per_shard,
        chunk=options.tokens_per_chunk,
        meaning=meaning,
    )


# The shards


def _rows_of(source: "Source", template: "ChatTemplate", config: CorpusData, tokens: int) -> int:
    """Return how many rows have so many tokens, about, by the first ones."""
    from app.data.corpus.encode import encoded

    sampled = there = 0
    for table, rows in source.tables(source.everything()):
        some = rows[: SAMPLED - sampled]
        sampled, there = sampled + len(some), there + sum(len(e.tokens) for e in encoded(table, some, config, template))
        if sampled >= SAMPLED:
            break
    return max(1, round(tokens * sampled / max(there, 1)))


def _go_through(job: "Job", parts: "Sequence[range]", options: Options) -> "list[Listed]":
    """Make all shards, and show how many there are; return them in their order."""
    from tqdm import tqdm

    from app.commands.tokenize.shards import made_by
    from app.rundir.progress import duration

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = options.workers or cores
    made: dict[int, Listed | None] = {}
    begun = shown = time.monotonic()
    tokens, draws = 0, sys.stderr.isatty()
    with tqdm(total=len(parts), unit="shard", dynamic_ncols=True, disable=not draws) as bar:
        for number, listed in made_by(job, parts, workers):
            made[number] = listed
            tokens += listed.amount.tokens if listed else 0
            bar.update()
            bar.set_postfix(tokens=f"{tokens:,}", refresh=False)
            now = time.monotonic()
            if not draws and now - shown >= SECONDS:
                shown, left = now, (now - begun) / len(made) * (len(parts) - len(made))
                print(f"shard {len(made)}/{len(parts)}  {tokens:,} tokens  {duration(left)} left", flush=True)
    return [listed for _, listed in sorted(made.items()) if listed is not None]
