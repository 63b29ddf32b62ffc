"""Shards of tokens, as `tokenize` writes them, in small."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.commands.tokenize.command import Options, main
from app.launching.flags import parse_command


def tokenize(source: Path | str, out: Path | str, *words: Any) -> int:
    """Run the command in this process, with one worker and bytes as tokens, unless words say otherwise."""
    others = [str(word) for word in words]
    small = {"--workers": "1", "--tokens-per-shard": "300", "--tokens-per-chunk": "64"}
    if not {"--tokenizer", "--scratch.tokenizer"} & {*others}:
        small["--scratch.tokenizer"] = "byte"
    more = [part for flag, value in small.items() if flag not in others for part in (flag, value)]
    options, _ = parse_command(Options, [str(source), str(out), *more, *others], "tokenize", rest=False)
    return main(options)


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as jsonl."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_tokens(folder: Path, texts: Sequence[str]) -> None:
    """Write texts into one shard and the rest of a folder of tokens."""
    rows = write_rows(folder.parent / f"{folder.name}.jsonl", [{"text": text} for text in texts])
    tokenize(rows, folder, "--tokens-per-shard", 10**6)
