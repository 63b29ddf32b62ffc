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

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from app.config import setting
from app.data.config import CorpusData
from app.errors import UserError

if TYPE_CHECKING:
    from app.commands.tokenize.sources import Source
    from app.data.corpus.chat_template import ChatTemplate
    from app.data.corpus.token_shards import Settings, TokensRecord

LARGEST = 2**32  # tokens of a vocabulary


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
    """Split that the shards belong to, and the prefix of their names."""
    source_split: str = ""
    """Split of SOURCE, or a slice of one, such as train[:90%]. Default: --split; of a file, all of it."""
    workers: int = setting(0, at_least=0)
    """Processes that tokenize. 0: one for each core."""
    tokens_per_shard: int = setting(2**26, at_least=1)
    """Tokens of a shard, about: a whole number of rows of SOURCE, or of its chunks where it is read by chunks."""
    tokens_per_chunk: int = setting(2**20, at_least=8)
    """Approximate number of tokens in a row group, the unit that is read. Blocks never cross it."""


def main(options: Options) -> int:
    """Tokenize, and return the exit status.

    Raises:
        UserError: SOURCE or the tokenizer cannot be read, or OUT cannot be written or holds something else.
    """
    from app.commands.tokenize.out import Out
    from app.commands.tokenize.shards import Job
    from app.commands.tokenize.sources import open_texts
    from app.commands.tokenize.tokenizer import chosen_tokenizer, naming_tokenizer
    from app.commands.tokenize.workers import make_all
    from app.data.cache import using_cache
    from app.data.corpus.encode import template_of
    from app.data.tables.columns import amount

    out = Out(options.out, options.split)
    records = out.records()
    others = {split: record for split, record in records.items() if split != options.split}
    config = _config(options, records)
    with using_cache(), naming_tokenizer():
        source = open_texts(options.source, options.source_split or options.split, options.data.stream, config)
        tokenizer, name = chosen_tokenizer(
            options.tokenizer, options.scratch, others, out.tokenizer_folder, source, config
        )
        template = template_of(config, tokenizer)
        settings = _settings(options, source, template, name, config)
        out.begin(records, settings, tokenizer)
        job = Job(out.path, options.split, settings, config, template, source)
        try:
            shards = make_all(job, job.parts(), options.workers)
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on with the shards that are not made yet", file=sys.stderr)
            raise
    if not shards:
        raise UserError(f"SOURCE {options.source} has no text to learn: all of it is empty")
    out.finish(settings, shards)
    amounts = [each.amount for each in shards]
    tokens, documents = sum(each.tokens for each in amounts), sum(each.documents for each in amounts)
    print(
        f"{options.out}: {amount(len(shards), 'shard')} of {options.split}, {tokens:,} tokens of {documents:,} "
        f"documents, vocabulary {settings.meaning.vocabulary:,}"
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
    from app.data.text.encoding import lasting_identity
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
