"""Sentences with a tag for each token, and the files in which they come."""

import gzip
import json

SENTENCES = [
    (["Ada", "Lovelace", "wrote", "in", "London", "."], ["B-PER", "I-PER", "O", "O", "B-LOC", "O"]),
    (["Turing", "unbelievably", "slept"], ["B-PER", "O", "O"]),
    (["Rome"], ["B-LOC"]),
    (["the", "Lovelace", "Medal"], ["O", "B-MISC", "I-MISC"]),
] * 5
NAMES = ["B-LOC", "B-MISC", "B-PER", "I-MISC", "I-PER", "O"]


def write(folder, kind, sentences=SENTENCES):
    """Write sentences in a format; return the file."""
    lines = [json.dumps({"tokens": tokens, "tags": tags}) for tokens, tags in sentences]
    if kind.startswith("conll"):
        mark = "\t" if "tab" in kind else " "
        lines = ["-DOCSTART- -X- O", ""]
        for tokens, tags in sentences:
            lines += [mark.join([token, "NN", tag]) for token, tag in zip(tokens, tags, strict=True)]
            lines.append("")
    if kind == "conllu":
        lines = []
        for tokens, tags in sentences:
            lines += ["# text = ...", "1-2\tjoined" + "\t_" * 8]
            for number, (token, tag) in enumerate(zip(tokens, tags, strict=True), 1):
                lines.append(f"{number}\t{token}\t_\t{tag}" + "\t_" * 6)
            lines.append("")
    file = folder / f"rows.{'jsonl' if kind == 'json' else kind.split('-')[0]}"
    file.write_text("\n".join(lines) + "\n")
    if kind.endswith("gz"):
        packed = folder / f"{file.name}.gz"
        packed.write_bytes(gzip.compress(file.read_bytes()))
        return packed
    return file
