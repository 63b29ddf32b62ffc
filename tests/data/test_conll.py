"""CoNLL files: every scheme with every header, comment, separator and line end is read, or the odd line is named."""

import pytest

from app.commands.predict.command import TAGS, _open
from app.data.config import TagData
from app.data.text import tagged_text
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("data_cache")
# In IOB2; # and #x are words, one of them the first of its sentence.
SENTENCES = [
    (["Ann", "Lee", "met", "Bob", "in", "New", "York"], ["B-PER", "I-PER", "O", "B-PER", "O", "B-LOC", "I-LOC"]),
    (["#", "1", "of", "Oslo", "Rome"], ["O", "O", "O", "B-LOC", "B-LOC"]),
    (["Ann", "Rome", "#x", "10\u00a0000"], ["B-PER", "B-LOC", "B-PER", "O"]),
    (["#x", "said", "Bob", "Bob", "Lee"], ["B-PER", "O", "B-PER", "B-PER", "I-PER"]),
]
POS = {"O": "X", "B-PER": "NOUN", "I-PER": "PROPN", "B-LOC": "VERB", "I-LOC": "ADJ"}


def iob1(tags):
    before, out = "O", []
    for tag in tags:
        parts = tag[0] == "B" and tag[2:] == before[2:] and before != "O"
        out.append(tag if tag == "O" or parts else f"I-{tag[2:]}")
        before = tag
    return out


def ended(tags, last, single):
    """Write BIOES, or BILOU with other letters."""
    out = []
    for tag, after in zip(tags, [*tags[1:], "O"], strict=True):
        ends = after[0] != "I"
        mark = {("B", True): single, ("I", True): last}.get((tag[0], ends), tag[0])
        out.append(tag if tag == "O" else f"{mark}-{tag[2:]}")
    return out


SCHEMES = {
    "iob2": (list, list),
    "iob1": (iob1, list),
    "bioes": (lambda tags: ended(tags, "E", "S"),) * 2,
    "bilou": (lambda tags: ended(tags, "L", "U"),) * 2,
    "pos": (lambda tags: [POS[tag] for tag in tags],) * 2,
}
HEADERS = {"": "", "document": "-DOCSTART- -X- O\n\n", "title": "# a file of names\n# made by hand of all\n\n"}
COMMENTS = {
    "": "",
    "id": "# id 5239d808 domain=en\n",
    "as many fields": "# id {}\n",
    "hash": "#\n",
    "u": "# text = Ann\n",
}
WAYS = {"blanks": (" ", "\n"), "tabs": ("\t", "\n"), "windows": (" ", "\r\n"), "trailing": (" ", "  \n")}


def write(file, tags, header="", comment="", way="blanks", middle=("_",), cut=False):
    sep, end = WAYS[way]
    text = header
    for number, (words, own) in enumerate(SENTENCES * 5):
        text += comment.format(number)
        text += "".join(sep.join((word, *middle, tag)) + "\n" for word, tag in zip(words, tags(own), strict=True))
        text += "\n"
    text = text.replace("\n", end)
    file.write_bytes(text.rstrip().encode() if cut else text.encode())
    return file


def read(file, **flags):
    tables, tags = tagged_text.load_tagged(TagData(path=(str(file),), holdout=0.2, **flags))
    found = []
    for name, table in (("train", tables.train), ("", tables.evaluation)):
        codes, start = tags.sets[name][0], 0
        for words in table["tokens"]:
            found.append((words, [tags.names[code] for code in codes[start : start + len(words)]]))
            start += len(words)
    return sorted(found), tags


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("comment", COMMENTS)
def test_every_scheme_is_read_below_every_header_and_comment(tmp_path, scheme, header, comment):
    """Where the tags do not tell a comment from a word, the line is named."""
    written, meant = SCHEMES[scheme]
    file = write(tmp_path / "rows.conll", written, HEADERS[header], COMMENTS[comment])
    truth = sorted((words, meant(tags)) for words, tags in SENTENCES * 5)
    if scheme == "pos" and comment == "as many fields":
        with pytest.raises(UserError, match=r"line \d of .*rows.conll, '# id 0', may be a comment or the word #"):
            read(file)
        return
    found, tags = read(file)
    assert found == truth and tags.spans == (scheme in ("iob2", "iob1", "bioes"))
    assert ("IOB1" in tags.note) == (scheme == "iob1")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("middle", [(), ("_",), ("a", "b", "c")])
def test_lines_end_and_are_parted_in_many_ways(tmp_path, way, cut, middle):
    file = write(tmp_path / "rows.txt", list, way=way, middle=middle, cut=cut)
    assert read(file)[0] == sorted(SENTENCES * 5)


def test_words_may_have_blanks_between_tabs(tmp_path):
    text = "".join(f"New York\tB-LOC\nis \tO\n\nAnn\tB-PER\n{end}\n" for end in ["", "\n", ""] * 4)
    (tmp_path / "rows.iob").write_text(text)
    found = read(tmp_path / "rows.iob")[0]
    assert (["New York", "is"], ["B-LOC", "O"]) in found and len(found) == 24
    (tmp_path / "rows.iob").write_text(f"{text}New York\n")
    with pytest.raises(UserError, match=r"line 65 of .* has 1 fields, and others have 2; its other lines have tabs"):
        read(tmp_path / "rows.iob")


LINES = ["Ann _ B-PER", "met _ O", "", "Bob _ B-PER", "in _ O", "Rome _ B-LOC", ""] * 3


@pytest.mark.parametrize("place", [0, 1, 9, 19])
@pytest.mark.parametrize("odd", ["word O", "a b c O", "word", "# no comment here, but words", "a _ ", "a\u00a0_ O"])
def test_the_odd_line_is_named_and_no_other(tmp_path, place, odd):
    """Also where it is the first one; but a comment may stand before a sentence."""
    lines = [*LINES[:place], odd, *LINES[place:]]
    (tmp_path / "rows.conll").write_text("\n".join(lines))
    if odd[0] == "#" and place in (0,):
        assert len(read(tmp_path / "rows.conll")[0]) == 6
        return
    with pytest.raises(UserError, match=rf": line {place + 1} of .*rows.conll has \d fields, and others have 3: write"):
        read(tmp_path / "rows.conll")


def test_a_missing_token_or_tag_is_named(tmp_path):
    lines = ["Ann\t_\tB-PER", "met\t_\tO", "\t_\tO", ""] * 3
    (tmp_path / "rows.conll").write_text("\n".join(lines))
    with pytest.raises(UserError, match=r"line 3 of .*rows.conll has no token: "):
        read(tmp_path / "rows.conll")


def conllu(number, form, upos="X", misc="_"):
    return "\t".join((str(number), form, form, upos, "_", "_", "0", "root", "_", misc))


@pytest.mark.parametrize("name", ["rows.conllu", "rows.conll", "rows.txt", "rows"])
def test_conllu_is_known_by_its_lines(tmp_path, name):
    """With ranges, empty nodes and the word #; whatever the file is called."""
    rows = [
        "# sent_id = 1",
        "# text = im # da",
        conllu("1-2", "im", "_"),
        conllu(1, "in", "ADP"),
        conllu(2, "dem", "DET"),
    ]
    rows += [conllu(3, "#", "SYM", "SpaceAfter=No"), conllu("3.1", "ist", "_"), conllu(4, "da", "ADV"), ""]
    (tmp_path / name).write_text("\n".join(rows * 10))
    assert read(tmp_path / name)[0] == [(["in", "dem", "#", "da"], ["ADP", "DET", "SYM", "ADV"])] * 10


def test_numbers_of_words_are_no_tokens(tmp_path):
    """As in GermEval's files of four columns."""
    rows = ["#\thttp://x [2009]", "1\tAnn\tB-PER\tO", "2\tmet\tO\tO", "3\t#\tO\tO", ""] * 10
    file = tmp_path / "rows.tsv.conll"
    file.write_text("\n".join(rows))
    with pytest.raises(UserError, match=r"has 4 columns, of which the first one numbers the words, .* --data.columns"):
        read(file)
    found = read(file, columns=("id", "tokens", "tags", "inner"))[0]
    assert found == [(["Ann", "met", "#"], ["B-PER", "O", "O"])] * 10


@pytest.mark.parametrize(
    ("tags", "flag", "found"),
    [
        (["I-A", "B-A", "O"], "auto", ["B-A", "B-A", "O"]),
        (["I-A", "I-A", "O"], "auto", ["B-A", "I-A", "O"]),
        (["I-A", "I-B", "I-B"], "auto", ["B-A", "B-B", "I-B"]),
        (["O", "B-A", "I-B"], "iob1", ["O", "B-A", "B-B"]),
        (["B-A", "I-A", "B-A"], "iob1", ["B-A", "I-A", "B-A"]),
        (["O", "B-A", "I-B"], "auto", "has I-B after B-A, but in IOB2 .* --data.scheme iob1"),
        (["I-A", "O", "B-A"], "auto", "has I-A after the beginning, but in IOB2"),
        (["I-A", "O", "B-A"], "plain", ["I-A", "O", "B-A"]),
        (["I-A", "O", "E-A"], "iob1", "--data.scheme iob1: E-A are not O, B-name or I-name"),
    ],
)
def test_iob1_is_known_or_asked_for(tmp_path, tags, flag, found):
    (tmp_path / "rows.conll").write_text("".join(f"w {tag}\n" for tag in tags).join(["", "\n"] * 10) + "\n")
    (tmp_path / "rows.conll").write_text(("".join(f"w {tag}\n" for tag in tags) + "\n") * 10)
    if isinstance(found, str):
        with pytest.raises(UserError, match=found):
            read(tmp_path / "rows.conll", scheme=flag)
        return
    assert read(tmp_path / "rows.conll", scheme=flag)[0] == [(["w"] * 3, found)] * 10


def test_iob1_of_classes_that_are_named(tmp_path):
    """As the Hub has the first CoNLL set: its names lack the B- of kinds that never touch."""
    import datasets

    names = ["O", "B-PER", "I-PER", "I-LOC"]
    kinds = datasets.Features(
        {"tokens": datasets.List(datasets.Value("string")), "tags": datasets.List(datasets.ClassLabel(names=names))}
    )
    rows = {"tokens": [["Ann", "Bob", "in", "Rome"]] * 10, "tags": [[2, 1, 0, 3]] * 10}
    datasets.Dataset.from_dict(rows, kinds).to_parquet(tmp_path / "rows.parquet")
    found, tags = read(tmp_path / "rows.parquet")
    assert found[0][1] == ["B-PER", "B-PER", "O", "B-LOC"] and tags.names == [*names, "B-LOC"]


def test_words_alone_are_read_to_be_tagged(tmp_path):
    """By predict; to train on they lack tags."""
    (tmp_path / "rows.txt").write_text("Ann\nmet\n\nBob\n")
    assert list(_open(str(tmp_path / "rows.txt"), "train", TAGS)["tokens"]) == [["Ann", "met"], ["Bob"]]
    with pytest.raises(UserError, match=r"--data.tags tags: .*write a token and its tag in each line"):
        read(tmp_path / "rows.txt")
