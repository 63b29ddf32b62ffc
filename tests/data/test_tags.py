"""Tags of tokens: read from any format, given to sub-words, refused where they do not fit, scored like seqeval."""

import sysconfig
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tag_files import NAMES, SENTENCES, write
from transformers import RobertaConfig, RobertaForMaskedLM

from app.data.config import TagData
from app.data.rows import IGNORED
from app.data.tables.builtin_code import TAGS, name_rows, tagged
from app.data.text import tagged_text
from app.data.text.tokens import PadCollate
from app.errors import UserError
from app.tasks.pretrained import load_tokenizer
from app.training.scores.tags import EntityScores, TokenScores

pytestmark = pytest.mark.usefixtures("data_cache")


def read(file, **flags):
    return tagged_text.load_tagged(TagData(path=(str(file),), holdout=0.2, **flags))


def rows_of(table):
    return [(row["tokens"], row["tags"]) for row in table.select_columns(["tokens", "tags"])]


@pytest.mark.parametrize("kind", ["json", "conll", "conll-tab", "conll-gz", "conllu"])
def test_every_format_gives_the_same_rows(tmp_path, kind):
    tables, tags = read(write(tmp_path, kind))
    found = rows_of(tables.train) + rows_of(tables.evaluation)
    assert sorted(found) == sorted(SENTENCES) and len(tables.evaluation) == 4
    assert tags.names == NAMES and tags.spans
    codes, counts = tags.sets["train"]
    assert [tags.names[code] for code in codes] == [tag for _, own in rows_of(tables.train) for tag in own]
    assert counts.tolist() == [len(tokens) for tokens, _ in rows_of(tables.train)]


@pytest.mark.parametrize("end", ["", ".txt"])
def test_a_folder_of_splits_needs_no_extensions(tmp_path, end):
    for split in ("train", "dev"):
        write(tmp_path, "conll", SENTENCES[:8] if split == "dev" else SENTENCES).rename(tmp_path / f"{split}{end}")
    tables, _ = read(tmp_path)
    assert (len(tables.train), len(tables.evaluation)) == (20, 8)
    tables, _ = read(tmp_path / f"train{end}", eval_path=str(tmp_path / f"dev{end}"), columns=("tokens", "pos", "tags"))
    assert (len(tables.train), len(tables.evaluation)) == (20, 8) and "pos" in tables.train.column_names


@pytest.mark.parametrize(
    ("kind", "sentences", "flags", "said"),
    [
        ("json", [(["a", "b"], ["O"])], {}, r"row 0 .* has 1 tags for 2 tokens"),
        ("json", [([], [])], {}, r"has 0 tags for 0 tokens.*leave out rows"),
        ("json", [(["a", "b"], ["O", "I-PER"])], {}, r"row 0 .* has I-PER after O, but in IOB2"),
        ("json", [(["a"], ["O"]), (["b"], ["I-PER"])], {}, r"I-PER after the beginning"),
        ("json", [(["a", "b"], ["B-LOC", "I-PER"])], {}, r"I-PER after B-LOC"),
        ("json", [(["a"], ["NOUN"])], {"scheme": "iob2"}, r"NOUN are not O, B-name or I-name"),
        ("json", [(["a"], ["NOUN"])], {"scheme": "bioes"}, r"NOUN are not O, B-name, I-name, E-name or S-name"),
        ("json", [(["a", "b"], ["S-LOC", "E-LOC"])], {"scheme": "bioes"}, r"E-LOC after S-LOC, but in BIOES"),
        ("json", [(["a", "b"], ["B-LOC", "E-PER"])], {"scheme": "bioes"}, r"E-PER after B-LOC, but in BIOES"),
        ("json", [(["a", "b"], ["O", "B-LOC"])], {"scheme": "bioes"}, r"row 0 .* has the end after B-LOC"),
        ("json", [(["a", "b"], ["B-PER", "S-LOC"])], {"scheme": "bioes"}, r"has S-LOC after B-PER, but in BIOES"),
        ("json", SENTENCES, {"tags": "label"}, r"--data.tags label: no such key"),
        ("json", SENTENCES, {"classes": ("O", "B-PER", "I-PER")}, r"row . .* is none of the 3 classes"),
        ("conll", [(["a", "b c"], ["O", "O"])], {}, r"line 4 of .*rows.conll has 4 fields, and others have 3"),
        ("json", SENTENCES, {"pad_to_multiple_of": 3}, r"--data.pad-to-multiple-of 3: must divide --data.max-length"),
        ("conll", SENTENCES, {"columns": ("tokens", "tags")}, r"has 3 columns, and --data.columns names 2"),
        ("conll", [(["a"], ["O"]), (["a", "b"], ["O", "I-PER"])], {}, r": line 6 of .*rows.conll has I-PER after O"),
        ("conllu", [(["a", "b"], ["O", "I-PER"])], {}, r": line 4 of .*rows.conllu has I-PER after O"),
        ("conll", [(["a"], ["X"])], {"classes": tuple(NAMES)}, r": line 3 of .*rows.conll has a label that is none"),
        (
            "conll",
            [(["a", "b"], ["O", "I-PER"])],
            {"columns": ("tokens", "file", "tags")},
            r"row 0 .* has I-PER after O",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, kind, sentences, flags, said):
    with pytest.raises(UserError, match=said):
        read(write(tmp_path, kind, [*sentences, *SENTENCES]), **flags)


@pytest.mark.parametrize(
    ("kind", "tag", "flags", "said"),
    [
        ("conll", "O", {}, r"--data.tags tags: all 8 tokens to train on have the tag O: give data with two tags"),
        ("json", "B-X", {"classes": ("B-X", "O")}, r"all 8 tokens to train on have the tag B-X"),
    ],
)
def test_one_tag_teaches_nothing(tmp_path, kind, tag, flags, said):
    with pytest.raises(UserError, match=said):
        read(write(tmp_path, kind, [(["word"], [tag])] * 10), **flags)


@pytest.mark.parametrize("place", [0, 5000])
def test_files_of_another_encoding_are_told_how_to_convert(tmp_path, place):
    """At the beginning, where names of columns are looked for, or later."""
    file = write(tmp_path, "conll", SENTENCES * 100)
    text = file.read_text()
    file.write_bytes(f"{text[:place]}\n\nÖl O O\n\n{text[place:]}".encode("latin1"))
    with pytest.raises(UserError, match=r"rows.conll: cannot be read: .* convert it, .*iconv -f latin1 -t utf8"):
        read(file)


def test_tags_that_are_no_spans_are_learnt_as_they_are(tmp_path):
    _, tags = read(write(tmp_path, "conll", [(["a", "runs"], ["DET", "VERB"])] * 10))
    assert tags.names == ["DET", "VERB"] and not tags.spans
    _, tags = read(write(tmp_path, "json", [(["a", "b"], ["O", "I-PER"])] * 10), scheme="plain")
    assert tags.names == ["I-PER", "O"] and not tags.spans


def test_entities_in_bioes_are_spans(tmp_path):
    """Also if none has three tokens; the same tags without S- and E- are IOB2."""
    rows = [(["a", "b", "c", "d"], ["B-x", "E-x", "S-y", "O"])] * 10
    _, tags = read(write(tmp_path, "json", rows))
    assert tags.spans and tags.names == ["B-x", "E-x", "O", "S-y"]
    assert tags.summary() == "4 tags of 2 kinds of entities: x, y"
    _, tags = read(write(tmp_path, "conll", [(["a", "b", "c"], ["B-x", "I-x", "E-x"])] * 10), scheme="bioes")
    assert tags.spans and tags.names == ["B-x", "E-x", "I-x"]


def roberta(folder):
    """Write a tokenizer that puts a space before each word only if it is asked to."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import RobertaTokenizerFast

    own = ByteLevelBPETokenizer()
    own.train_from_iterator([" ".join(tokens) for tokens, _ in SENTENCES], 400, special_tokens=["<s>", "<pad>", "</s>"])
    RobertaTokenizerFast(tokenizer_object=own._tokenizer, model_max_length=64).save_pretrained(folder)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    RobertaForMaskedLM(RobertaConfig(vocab_size=400, max_position_embeddings=70, **size)).save_pretrained(folder)
    return load_tokenizer(str(folder), 64, in_words=True)


@pytest.mark.parametrize("kind", ["own", "roberta"])
@pytest.mark.parametrize("longest", [64, 6])
def test_the_first_sub_word_of_each_token_has_its_tag(tmp_path, kind, longest):
    """As in transformers' example of token classification, also where a sentence is cut."""
    tables, tags = read(write(tmp_path, "json"))
    if kind == "own":
        tokenizer = tagged_text.own_tokenizer(tables.train, "tokens", 300, longest)
    else:
        tokenizer = roberta(tmp_path / "model")
    rows = tagged_text.tokenize(tables.train, "tokens", tags.sets["train"], tokenizer, longest)
    batch = PadCollate.of(tokenizer)([rows[i] for i in range(len(rows))])
    for i, (tokens, own) in enumerate(rows_of(tables.train)):
        encoded = tokenizer(tokens, is_split_into_words=True, truncation=True, max_length=longest)
        words, expected = encoded.word_ids(), []
        for place, word in enumerate(words):
            new = word is not None and (not place or word != words[place - 1])
            expected.append(tags.names.index(own[word]) if new else IGNORED)
        assert rows[i]["labels"].tolist() == expected and rows[i]["input_ids"].tolist() == encoded["input_ids"]
        assert rows.token_weights[i] == sum(label != IGNORED for label in expected)
        padded = expected + [IGNORED] * (batch["labels"].shape[1] - len(expected))
        assert batch["labels"][i].tolist() == padded and batch["labels"].dtype == torch.int64
    assert (rows.truncated > 0) == (longest == 6)
    if kind == "roberta":
        assert tokenizer.convert_ids_to_tokens(rows[0]["input_ids"].tolist())[1].startswith("Ġ")


def test_there_must_be_room_for_tokens(tmp_path):
    tables, tags = read(write(tmp_path, "json"))
    tokenizer = tagged_text.own_tokenizer(tables.train, "tokens", 300, 64)
    with pytest.raises(UserError, match=r"--data\.max-length 2 leaves no room for text"):
        tagged_text.tokenize(tables.train, "tokens", tags.sets["train"], tokenizer, 2)


def test_the_same_tags_on_other_rows_are_other_data(tmp_path):
    """The cache of sub-words knows which tags they have."""
    first, swapped = write(tmp_path, "json"), [(tokens, tags[::-1]) for tokens, tags in SENTENCES]
    tables, tags = read(first, scheme="plain")
    tokenizer = tagged_text.own_tokenizer(tables.train, "tokens", 300, 64)
    rows = tagged_text.tokenize(tables.train, "tokens", tags.sets["train"], tokenizer, 64)
    tables, tags = read(write(tmp_path, "json", swapped), scheme="plain")
    others = tagged_text.tokenize(tables.train, "tokens", tags.sets["train"], tokenizer, 64)
    assert rows.fingerprint != others.fingerprint


SCHEMES = (
    ["O", "B-a", "I-a", "B-b", "I-b"],
    ["B-x", "I-x", "O", "S-x", "E-x", "B-y", "I-y", "E-y", "S-y"],
    ["I-a", "O", "I-b"],
)


@settings(derandomize=True, deadline=None, database=None, max_examples=150)
@given(st.sampled_from(SCHEMES), st.integers(0, 10**6))
def test_entities_are_scored_as_by_seqeval(names, seed):
    """Any tags in any order, over several micro-batches, some without a tag."""
    seqeval = pytest.importorskip("seqeval.metrics")
    draw, scores, truths, guesses = np.random.default_rng(seed), EntityScores(names), [], []
    for _ in range(3):
        size = draw.integers(1, 6), draw.integers(1, 12)
        truth = draw.integers(0, len(names), size)
        guess = np.where(draw.random(size) < 0.7, truth, draw.integers(0, len(names), size))
        truth[draw.random(size) < 0.2] = IGNORED
        scores.update(torch.nn.functional.one_hot(torch.tensor(guess), len(names)).float(), torch.tensor(truth))
        for a, b in zip(truth, guess, strict=True):
            known = a != IGNORED
            if known.any():
                truths.append([names[i] for i in a[known]])
                guesses.append([names[i] for i in b[known]])
    if not truths:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {
            "precision": seqeval.precision_score(truths, guesses),
            "recall": seqeval.recall_score(truths, guesses),
            "f1": seqeval.f1_score(truths, guesses),
            "accuracy": seqeval.accuracy_score(truths, guesses),
        }
        reported = seqeval.classification_report(truths, guesses, output_dict=True)
    assert scores.alone() == pytest.approx(expected)
    assert_reported(scores.report()["entities"], reported)


def assert_reported(ours: dict, theirs: dict) -> None:
    """Compare by type, and the means; seqeval names those types alone that occur, and has 0 where we have nothing."""
    occur = {name: row for name, row in ours.items() if row["support"] or row["precision"] is not None}
    means = {name for name in ours if name.endswith(" avg")}
    assert set(theirs) <= set(ours) and set(occur) - means <= set(theirs)
    for name, row in theirs.items():
        theirs_named = {"f1" if key == "f1-score" else key: value for key, value in row.items()}
        if name == "macro avg" and len(occur) - len(means & set(occur)) < len(ours) - len(means):
            continue  # seqeval takes the mean over the types that occur
        assert {key: value or 0 for key, value in ours[name].items()} == pytest.approx(theirs_named), name


def test_tokens_without_a_tag_are_not_scored():
    logits = torch.eye(3)[[0, 1, 2, 2]].unsqueeze(0)
    scores = TokenScores(3)
    scores.update(logits, torch.tensor([[0, 1, 1, IGNORED]]))
    assert scores.alone()["accuracy"] == pytest.approx(2 / 3)


def test_names_of_a_function_are_what_they_are():
    row = tagged("def f(path, *rest):\n    part = os.path.join(path, 'ä')\n    return part.size + len  # no\n")
    assert list(zip(row["tokens"], row["tags"], strict=True)) == [
        ("def", "O"),
        ("f", "O"),
        ("(", "O"),
        ("path", "B-argument"),
        (",", "O"),
        ("*", "O"),
        ("rest", "B-argument"),
        (")", "O"),
        (":", "O"),
        ("part", "B-local"),
        ("=", "O"),
        ("os", "B-call"),
        (".", "I-call"),
        ("path", "I-call"),
        (".", "I-call"),
        ("join", "I-call"),
        ("(", "O"),
        ("path", "B-argument"),
        (",", "O"),
        ("'ä'", "O"),
        (")", "O"),
        ("return", "O"),
        ("part", "B-local"),
        (".", "O"),
        ("size", "B-attribute"),
        ("+", "O"),
        ("len", "B-builtin"),
    ]


@pytest.mark.long
def test_all_names_of_the_library_are_in_iob2():
    rows = list(name_rows(sysconfig.get_path("stdlib")))
    assert len(rows) > 1000 and {tag for row in rows for tag in row["tags"]} <= set(TAGS)
    for row in rows:
        for before, tag in zip(["O", *row["tags"]], row["tags"], strict=False):
            assert not tag.startswith("I-") or before[2:] == tag[2:]


def test_a_model_of_another_order_of_tags_keeps_it(tmp_path):
    """--data.classes is the order of the model's outputs."""
    _, tags = read(write(tmp_path, "json"), classes=tuple(reversed(NAMES)))
    assert tags.names == NAMES[::-1]
