"""Blocks of tokens that are read by chunks: the same tokens as blocks of texts have, each predicted once."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.damage import flip
from support.token_shards import tokenize, write_rows

from app.config.needs import EVERYTHING
from app.data.config import CorpusData
from app.data.corpus import corpus, token_sets
from app.data.corpus.blocks import IGNORED, Blocks
from app.data.corpus.encode import tokenize as tokenize_table
from app.data.corpus.token_blocks import TokenBlocks
from app.data.corpus.token_shards import Meaning, ShardWriter, Tokens, find_tokens, tokens_of
from app.data.loading import open_source
from app.data.streams.chunks import Chunk
from app.data.streams.parquet_chunks import ParquetChunks
from app.data.text.tokenizer import byte_tokenizer
from app.errors import UserError
from app.sampling.pieces import Pieces

BEGIN, END = 256, 257
TEXTS = [" ".join(f"word {i}" for i in range(n % 7)) for n in range(90)]
SIZES = (2, 7, 16, 1000)


@pytest.fixture
def made(own_data_cache, tmp_path):
    """Give a function that tokenizes rows, and returns the folder of the tokens and the file of the rows."""

    def made(rows, *words):
        file = write_rows(tmp_path / f"rows-{len(list(tmp_path.iterdir()))}.jsonl", rows)
        folder = file.with_suffix("")
        assert tokenize(file, folder, *words) == 0
        return folder, file

    return made


def blocks_of(folder, size, apart=True, **flags):
    config = CorpusData(path=(str(folder),), block=size, packing="documents" if apart else "concat", **flags)
    return token_sets._open("--data.path", str(folder), "train", config)


def read(blocks):
    if isinstance(blocks, Blocks):
        return [blocks[number] for number in range(len(blocks))]
    rows = blocks.__getitems__(range(len(blocks)))
    for number in {0, len(blocks) // 2, len(blocks) - 1}:
        assert all((blocks[number][name] == rows[number][name]).all() for name in rows[number])
    return rows


def pairs(rows):
    """Return each supervised token and what it is predicted from, in order."""
    columns = [zip(row["input_ids"].tolist(), row["targets"].tolist(), strict=True) for row in rows]
    return [pair for column in columns for pair in column if pair[1] != IGNORED]


def blocks_of_texts(file, size, apart, tokenizer=None, **flags):
    config = CorpusData(path=(str(file),), block=size, **flags)
    table = open_source("--data.path", config.path)["train"]
    return Blocks(tokenize_table(table, config, tokenizer or byte_tokenizer(8)), size, BEGIN, apart)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_every_token_is_a_target_once_as_in_blocks_of_texts(made, size, apart):
    # No document is longer than the quarter of a chunk in which its end is looked for.
    folder, file = made([{"text": text} for text in TEXTS], "--tokens-per-chunk", 200, "--tokens-per-shard", 600)
    blocks, others = blocks_of(folder, size, apart), blocks_of_texts(file, size, apart)
    rows, wanted = read(blocks), pairs(read(others))
    found = pairs(rows)
    assert len(blocks._blocks) > 5, "several chunks"
    if apart:
        assert found == wanted
    else:  # where a chunk begins, nothing is before it
        assert [target for _, target in found] == [target for _, target in wanted]
        differing = [number for number, pair in enumerate(found) if pair != wanted[number]]
        starts = blocks._tokens.first.tolist()
        assert differing == starts[1:] and all(found[number][0] == BEGIN for number in differing)
    assert blocks.tokens == others.tokens == len(found) == len(blocks.documents)
    assert blocks.weights[np.arange(len(blocks))].tolist() == [np.count_nonzero(r["targets"] != IGNORED) for r in rows]
    for name in ("bytes", "count", "unlearnt", "date", "all_supervised"):
        assert getattr(blocks.documents, name) == getattr(others.documents, name), name
    assert {len(row["input_ids"]) for row in rows} == {size}
    if apart:
        begins = [(row["input_ids"] == BEGIN) & (row["targets"] != IGNORED) for row in rows]
        assert not any(row["position_ids"][begin].any() for row, begin in zip(rows, begins, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_blocks_are_numbered_through_chunks(made, size):
    blocks = blocks_of(made([{"text": text} for text in TEXTS])[0], size)
    assert blocks.sizes.tolist() == [-(-int(rows) // size) for rows in blocks._index.rows]
    assert blocks.first.tolist() == [0, *np.cumsum(blocks.sizes)[:-1].tolist()]
    numbers = np.arange(len(blocks))
    assert blocks.chunks_of(numbers).tolist() == np.repeat(np.arange(len(blocks.sizes)), blocks.sizes).tolist()
    for number in (-1, len(blocks)):
        with pytest.raises(IndexError):
            blocks[number]
        with pytest.raises(IndexError):
            blocks.weights[np.array([number])]


def test_a_document_goes_on_in_the_next_chunk(made):
    """What begins there is predicted from the beginning-of-text token, and no document begins."""
    folder, _ = made([{"text": "ab"}, {"text": "x" * 200}, {"text": "cd"}])
    blocks = blocks_of(folder, 1000)
    rows = read(blocks)
    targets = [row["targets"][row["targets"] != IGNORED].tolist() for row in rows]
    assert [each for target in targets for each in target] == [*b"ab", END, *b"x" * 200, END, *b"cd", END]
    assert len(targets) > 2 and [row["input_ids"][0] for row in rows] == [BEGIN] * len(rows)
    assert blocks.documents.count == 3
    begins = [int(np.count_nonzero(blocks._cache.table(c).column("begins"))) for c in range(len(rows))]
    assert sum(begins) == 3 and 0 in begins


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_prompts_are_read_and_not_learnt(made, size, apart):
    rows = [{"q": f"what is {i} " * (i % 9), "a": f" {i}"} for i in range(60)]
    flags = {"prompt": "q", "completion": "a"}
    folder, file = made(rows, "--data.prompt", "q", "--data.completion", "a")
    blocks, others = blocks_of(folder, size, apart, **flags), blocks_of_texts(file, size, apart, **flags)
    found = read(blocks)
    targets, wanted = ([target for _, target in pairs(each)] for each in (found, read(others)))
    assert targets == wanted and (not apart or pairs(found) == pairs(read(others)))
    weights = blocks.weights[np.arange(len(blocks))]
    assert weights.tolist() == [np.count_nonzero(row["targets"] != IGNORED) for row in found] and (weights > 0).all()
    assert weights.sum() == blocks.tokens == others.tokens == len(targets)
    assert blocks.sizes.sum() == len(blocks) and (blocks.sizes == 0).any()
    ids = np.concatenate([first + np.arange(size) for first, size in zip(blocks.first, blocks.sizes, strict=True)])
    assert ids.tolist() == [*range(len(blocks))]
    assert blocks.chunks_of(ids).tolist() == np.repeat(np.arange(len(blocks.sizes)), blocks.sizes).tolist()
    assert blocks.documents.bytes == others.documents.bytes


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("kind", ["text", "prompt"])
def test_what_can_be_masked_is_counted(made, kind, apart):
    rows = [{"q": f"what is {i} " * (i % 9), "a": f" {i}", "text": "e" * (i % 5)} for i in range(60)]
    flags = {"prompt": "q", "completion": "a"} if kind == "prompt" else {}
    blocks = blocks_of(made(rows, *(w for n, v in flags.items() for w in (f"--data.{n}", v)))[0], 7, apart, **flags)
    for part in (blocks, blocks.part(3, len(blocks) - 2)):
        wanted = []
        for number, row in enumerate(read(part)):
            known = np.zeros(7, bool)
            known[1 : part.filled(number)] = row["targets"][: part.filled(number) - 1] != IGNORED
            wanted.append(np.count_nonzero(known & (row["position_ids"] > 0) if apart else known))
        assert part.count_known().tolist() == wanted and max(wanted) > 1


@pytest.mark.parametrize("flags", [{}, {"prompt": "q", "completion": "text"}], ids=["texts", "prompts"])
def test_parts_are_all_together(made, flags):
    words = [word for name, value in flags.items() for word in (f"--data.{name}", value)]
    folder, _ = made([{"text": text or "-", "q": f"{text} " * 3} for text in TEXTS], *words)
    blocks = blocks_of(folder, 16, **flags)
    listed = [replace(each, amount=replace(each.amount, unlearnt=2)) for each in blocks.record.whole]
    blocks = TokenBlocks("--data.path", blocks._index, blocks._cache, replace(blocks.record, shards=listed), 16, True)
    whole = read(blocks)
    for cut in (1, len(blocks) // 3, len(blocks) - 1):
        parts = blocks.part(0, cut), blocks.part(cut, len(blocks))
        rows = [row for part in parts for row in read(part)]
        assert all((a[n] == b[n]).all() for a, b in zip(rows, whole, strict=True) for n in a)
        for name in ("count", "unlearnt"):
            assert sum(getattr(part.documents, name) for part in parts) == getattr(blocks.documents, name)
        assert abs(sum(part.documents.bytes for part in parts) - blocks.documents.bytes) <= 1
        assert sum(len(part.documents) for part in parts) == len(blocks.documents)
        assert sum(part.tokens for part in parts) == blocks.tokens
        assert sum(part.sizes for part in parts).tolist() == blocks.sizes.tolist()
        weights = np.concatenate([part.weights[:] for part in parts])
        assert weights.tolist() == blocks.weights[0 : len(blocks)].tolist()
        assert len({part.fingerprint for part in (*parts, blocks)}) == 3
        again = blocks.part(1, len(blocks)).part(0, 1)
        assert (again[0]["targets"] == whole[1]["targets"]).all()
        for part in parts:
            tokens = part.documents.tokens(0, len(part.documents))
            if not flags:
                assert part.documents.bytes == pytest.approx(np.count_nonzero(tokens < BEGIN), abs=12)
                targets = np.concatenate([row["targets"][row["targets"] != IGNORED] for row in read(part)])
                assert tokens.tolist() == targets.tolist()
            assert np.count_nonzero(part.documents.begins(0, len(tokens))) == part.documents.count


def test_the_fingerprint_is_that_of_the_tokens(made, tmp_path):
    rows = [{"text": text} for text in TEXTS]
    folder, _ = made(rows)
    first = blocks_of(folder, 16)
    found = read(first)
    moved = folder.rename(tmp_path / "moved")
    assert blocks_of(moved, 16).fingerprint == first.fingerprint
    assert blocks_of(made(rows)[0], 16).fingerprint == first.fingerprint
    other = blocks_of(made([*rows[:-1], {"text": rows[-1]["text"].replace("4", "3")}])[0], 16)
    assert other.fingerprint != first.fingerprint and other.weights.fingerprint_of(9) != first.weights.fingerprint_of(9)
    assert blocks_of(moved, 8).fingerprint != first.fingerprint != blocks_of(moved, 16, False).fingerprint
    assert pairs(read(other)) != pairs(found), "its chunks are not taken from the cache of the first"


def test_tokens_of_the_same_sizes_are_told_apart(made):
    """Neither the chunks in the cache, nor what was counted in them, are taken for those of others."""
    texts = [blocks_of(made([{"text": text}])[0], 4) for text in ("qwertyuiop", "bcdefghijk")]
    assert [each._index.size.tolist() for each in texts] == 2 * [texts[0]._index.size.tolist()]
    of_shards = [each.shard_hashes() for each in texts]
    assert of_shards[0].keys() == of_shards[1].keys() and of_shards[0] != of_shards[1]
    found = [[target for _, target in pairs(read(blocks))] for blocks in texts]
    assert found == [[*b"qwertyuiop", END], [*b"bcdefghijk", END]]
    prompts = [
        made([{"q": "abcdefghij"[:cut], "a": "abcdefghij"[cut:]}], "--data.prompt", "q", "--data.completion", "a")[0]
        for cut in (2, 7)
    ]
    supervised = [blocks_of(folder, 4, prompt="q", completion="a").weights[:].tolist() for folder in prompts]
    assert supervised == [[2, 4, 3], [1, 3]]


def test_no_flipped_bit_is_read(made):
    """Checksums of pages find those that unpacking does not."""
    blocks = blocks_of(made([{"text": text} for text in TEXTS])[0], 16)
    index, number = blocks._index, 3
    part, shard = index.part(number), int(index.shard[number])
    data = (Path(index.shards.folder) / index.shards.files[shard].name).read_bytes()
    tail, body = data[len(data) - index.tails[shard] :], data[part.start : part.start + part.size]
    reader = ParquetChunks("--data.path", "x", "")

    def table(body):
        return reader.table(Chunk(index.shards.files[shard], part, body, tail), index.features)

    healthy, read = table(body), 0
    for place in range(0, len(body)):
        try:
            found = table(flip(body, place, place % 8))
        except (ValueError, OSError):
            continue
        read += 1
        assert found.equals(healthy)
    assert read < len(body) / 4


def test_weights_of_texts_are_in_no_memory(made):
    blocks = blocks_of(made([{"text": text} for text in TEXTS])[0], 2)
    held = [value for value in vars(blocks).values() if isinstance(value, np.ndarray | Pieces)]
    assert held and all(len(each) <= len(blocks._index.rows) for each in held) and len(blocks.weights) > 500


def test_a_chunk_is_read_where_it_lies(made):
    blocks = blocks_of(made([{"text": text} for text in TEXTS])[0], 16)
    table = blocks._cache.table(1)
    ids = tokens_of(table, 3, 20).ids
    assert ids.dtype == np.uint16 and not ids.flags.owndata and not ids.flags.writeable
    address, buffer = ids.__array_interface__["data"][0], table.column("token").chunk(0).buffers()[1]
    assert buffer.address <= address < buffer.address + buffer.size


@pytest.mark.parametrize("lengths", [[10] * 20, [3, 200, 3], [64] * 4, [1] * 300, [500]])
def test_chunks_end_with_documents_near_their_size(tmp_path, lengths):
    meaning = Meaning("text", ["text"], "", 70_000, 0, 1)
    begins = np.zeros(sum(lengths), bool)
    begins[np.cumsum([0, *lengths[:-1]])] = True
    ids = np.arange(len(begins)) + 65_000
    tokens = Tokens(ids, begins, np.ones(len(begins), bool))
    files = []
    for name, pieces in {
        "at once": [tokens],
        "bit by bit": [tokens.part(i, i + 9) for i in range(0, len(ids), 9)],
    }.items():
        writer = ShardWriter(tmp_path / name, meaning, 64)
        for piece in pieces:
            writer.add(piece)
        amount = writer.close("", len(lengths), 0, 5)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1] and amount.tokens == amount.supervised == len(ids)
    from pyarrow import parquet

    with parquet.ParquetFile(tmp_path / "at once") as file:
        groups = [file.read_row_group(i) for i in range(file.num_row_groups)]
    assert np.concatenate([group.column("token").to_numpy() for group in groups]).tolist() == ids.tolist()
    assert {str(group.schema.field("token").type) for group in groups} == {"uint32"}
    for group, after in itertools.pairwise(groups):
        assert 56 <= len(group) <= 72
        near = begins[ids.tolist().index(group.column("token")[0].as_py()) :][56:72].any()
        assert after.column("begins")[0].as_py() == near


# What is refused


def loaded(folder, **flags):
    config = CorpusData(path=(str(folder),), **{"block": 16, **flags})
    tables = corpus.load(config)
    tokenizer = corpus.own_tokenizer(tables.train, config, "bpe", 300)
    return tables, [corpus.blocks(table, config, tokenizer) for table in (tables.train, tables.evaluation)]


def test_the_last_blocks_are_held_out_or_a_split_of_its_own_is_taken(made, tmp_path):
    folder, _ = made([{"text": text} for text in TEXTS])
    tables, (train, held) = loaded(folder, holdout=0.25)
    assert tables.held_out and len(held) == round(0.25 * len(blocks_of(folder, 16)))
    assert pairs(read(train)) + pairs(read(held)) == pairs(read(blocks_of(folder, 16)))
    about = corpus.describe(tables, train, {"": held}, byte_tokenizer(8))
    assert "held out" in about and "documents apart" in about
    other = write_rows(tmp_path / "dev.jsonl", [{"text": "a text to evaluate on"}])
    tokenize(other, folder, "--split", "validation")
    tables, (train, held) = loaded(folder)
    assert not tables.held_out and len(train) == len(blocks_of(folder, 16)) and held.tokens == 22
    assert f"(the tokens of {folder})" in corpus.describe(tables, train, {"": held}, byte_tokenizer(8))
    tables, (train, _) = loaded(folder, eval_path=str(other), holdout=0.0)
    assert tables.evaluation.num_rows == 1 and len(train) == len(blocks_of(folder, 16))
    tables, _ = loaded(folder, eval_sets=(f"own={folder}::validation", f"texts={other}"))
    assert tables.others["own"].tokens == 22 and tables.others["texts"].num_rows == 1
    config = CorpusData(path=(), eval_path=str(folder), block=16)
    from app.config.needs import Needs

    alone = corpus.load(config, Needs(training_rows=False))
    assert alone.evaluation.tokens == 22 and not alone.has_training_rows


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"split": "train[:10%]"}, ["--data.split train[:10%]", "no slices"]),
        ({"split": "validation"}, ["there are no tokens of the split validation; it has train"]),
        ({"eval_split": "train"}, ["--data.eval-split train", "trained on too"]),
        ({"eval_path": "FOLDER"}, ["--data.eval-path", "trained on too"]),
        ({"block": 10**6}, ["too few to hold some out", "--data.block"]),
        ({"prompt": "q", "completion": "a"}, ["holds tokens of text, not of q and a"]),
        ({"name": "x"}, ["--data.name"]),
        ({"path": ("ROWS",), "eval_path": "FOLDER"}, ["--data.eval-path", "tokenize both"]),
        ({"path": ("ROWS",), "eval_sets": ("a=FOLDER",)}, ["--data.eval-sets a", "tokenize both"]),
    ],
)
def test_flags_that_say_nothing_to_tokens_are_refused(made, flags, words):
    folder, file = made(
        [{"text": text} for text in TEXTS[:20]], "--tokens-per-chunk", 10**6, "--tokens-per-shard", 10**6
    )
    names = {"FOLDER": str(folder), "ROWS": str(file), "a=FOLDER": f"a={folder}"}
    given = {
        name: tuple(names.get(each, each) for each in value) if isinstance(value, tuple) else names.get(value, value)
        for name, value in flags.items()
    }
    with pytest.raises(UserError) as error:
        corpus.load(CorpusData(**{"path": (str(folder),), "block": 1 << 16 if "block" in flags else 16, **given}))
    assert all(word in str(error.value) for word in words), error.value


def test_another_tokenizer_is_refused(made):
    folder, _ = made([{"text": text} for text in TEXTS[:20]])
    config = CorpusData(path=(str(folder),), block=16)
    tables = corpus.load(config)
    assert corpus.blocks(tables.train, config, byte_tokenizer(512)) is tables.train
    other = byte_tokenizer(8)
    other.add_tokens(["more"])
    with pytest.raises(UserError, match=r"holds tokens of another tokenizer \(byte\)"):
        corpus.blocks(tables.train, config, other)
    ended = byte_tokenizer(8)
    ended.eos_token = ended.bos_token
    with pytest.raises(UserError, match="another tokenizer"):
        corpus.blocks(tables.train, config, ended)
    masked = corpus.own_tokenizer(tables.train, config, "byte", 0, masked=True)
    assert masked.mask_token_id == 258 and corpus.blocks(tables.train, config, masked) is tables.train
    with pytest.raises(UserError, match=r"--scratch.tokenizer char: .* was tokenized with byte"):
        corpus.own_tokenizer(tables.train, config, "char", 0)


def test_tokens_that_are_not_whole_are_refused(made):
    folder, _ = made([{"text": text} for text in TEXTS])
    record = json.loads((folder / "tokens.json").read_text())
    shards = record.pop("shards")
    (folder / "tokens.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="tokenize has not finished the split train: run the same command again"):
        blocks_of(folder, 16)
    shards[1]["amount"]["tokens"] += 1
    (folder / "tokens.json").write_text(json.dumps(record | {"shards": shards}))
    with pytest.raises(UserError, match=r"train-00001.parquet has [\d,]+ tokens, and should have"):
        blocks_of(folder, 16)
    with (folder / shards[0]["name"]).open("ab") as file:
        file.write(b"more")
    with pytest.raises(UserError, match=r"train-00000.parquet has [\d,]+ bytes, where tokens.json says"):
        blocks_of(folder, 16)
    (folder / shards[0]["name"]).rename(folder / "elsewhere")
    with pytest.raises(UserError, match=r"train-00000.parquet is gone"):
        blocks_of(folder, 16)
    (folder / "tokens.json").unlink()
    with pytest.raises(UserError, match="there are no tokens of the split train; it has no record of tokens"):
        find_tokens("--data.path", str(folder), "train")
    config = CorpusData(path=(str(folder),), block=16)
    with pytest.raises(UserError, match="holds tokens without a record"):
        corpus.blocks(corpus.load(config, EVERYTHING).train, config, byte_tokenizer(8))
