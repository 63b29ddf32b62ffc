"""A shard on a web server, which lists nothing, is read by its address."""

import pytest
from support.stream_shards import ROWS, WRITERS, expected, write_members
from support.web_server import serving

from app.data.config import TextData
from app.data.loading import load_tables
from app.data.streams.opening import stream
from app.data.streams.shards import Place, find_shards
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("own_data_cache")


@pytest.mark.parametrize("kind", WRITERS)
def test_a_shard_is_read_by_its_address(kind, tmp_path):
    (tmp_path / "my data").mkdir()
    WRITERS[kind](tmp_path / "my data" / f"part 0.{kind}", ROWS)
    with serving(tmp_path) as (url, asked):
        rows = stream(f"{url}/my%20data/part%200.{kind}")
        assert rows.__getitems__(range(len(ROWS))) == expected(kind)
        assert not [line for line in asked if line.endswith("/my%20data") or line.endswith("/")]


@pytest.mark.parametrize("place", ["a web server", "a folder"])
def test_what_is_evaluated_on_is_listed_once(place, tmp_path, monkeypatch):
    rows = [{"text": f"row {number}", "label": number % 3} for number in range(20)]
    for name in ("a", "b"):
        WRITERS["jsonl"](tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "b").mkdir()
    write_members(tmp_path / "b" / "val.tar", [("0.text", b"row"), ("0.label", b"1")])
    write_members(tmp_path / "b" / "train.tar", [("0.text", b"row"), ("0.label", b"1")])
    listed, entries = [], Place.entries
    monkeypatch.setattr(Place, "entries", lambda self, what: listed.append(what) or entries(self, what))
    with serving(tmp_path) as (url, _):
        trained = f"{url}/a.jsonl"
        scored = f"{url}/b.jsonl" if place == "a web server" else str(tmp_path / "b")
        config = TextData(path=(trained,), eval_path=scored, classes=("x", "y", "z"))
        assert len(load_tables(config).evaluation) == (20 if place == "a web server" else 1)
        assert listed == [f"--data.path {trained}", f"--data.eval-path {scored}"]
        config.eval_path = trained
        with pytest.raises(UserError, match=rf"^--data.eval-path {trained}: {trained} would be both trained on and ev"):
            load_tables(config)


def test_what_a_web_server_cannot_give_is_refused(tmp_path):
    WRITERS["jsonl"](tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.csv").write_text("a\n1\n")
    with serving(tmp_path) as (url, _):
        for path, says in {
            f"{url}/*.jsonl": "a web server does not list its files: name each of them",
            url: "a web server does not list its files: name each of them",
            f"{url}/a.csv": "a.csv cannot be streamed; what is streamed: parquet",
            f"{url}/b.jsonl": "cannot be listed: the store refuses it",
        }.items():
            with pytest.raises(UserError) as told:
                find_shards("--data.path", path)
            assert str(told.value).startswith(f"--data.path {path}: ") and says in str(told.value)
