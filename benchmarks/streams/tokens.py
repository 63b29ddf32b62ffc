"""Shards of tokens of the same texts."""

from pathlib import Path

from app.commands.tokenize.command import Options, main
from app.launching.flags import parse_command
from benchmarks.streams import shards


def write_tokens(folder: Path, rows: int, chunk: int = 1 << 18) -> Path:
    """Tokenize as many texts into chunks of about as many tokens, by bytes; return the folder."""
    source = shards.write_parquet(folder.with_name("texts-to-tokenize"), shards.texts(rows), 4)
    words = [f"{source}", f"{folder}", "--scratch.tokenizer", "byte", "--workers", "1"]
    words += ["--tokens-per-shard", str(chunk * 16), "--tokens-per-chunk", str(chunk)]
    options, _ = parse_command(Options, words, "tokenize", rest=False)
    if main(options):
        raise SystemExit("the texts could not be tokenized")
    return folder
