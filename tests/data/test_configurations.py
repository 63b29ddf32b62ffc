"""A folder of several configurations, as its card says: no file of one is both trained on and evaluated on."""

import datasets
import pytest
import yaml

from app.data import loading
from app.data.config import TextData
from app.data.text import labeled_text
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("own_data_cache")
ROWS = [{"text": f"row {i}", "label": i % 3} for i in range(90)]
BOTH = "both trained on and evaluated on"
# What the card says of each configuration: its files, those of its splits, or its folder.
CARD = {
    "one": {"data_files": "a.parquet", "default": True},
    "two": {"data_files": [{"split": "train", "path": "b*.parquet"}, {"split": "test", "path": "train-c.parquet"}]},
    "three": {"data_dir": "test-d"},
    "all": {"data_files": ["a.parquet", "b.parquet"]},
}
FILES = ("a.parquet", "b.parquet", "train-c.parquet", "test-d/e.parquet", "other.parquet")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with four configurations in it, and a file that is of none."""
    listed = [{"config_name": name, **said} for name, said in CARD.items()]
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': listed})}---\n")
    for number, name in enumerate(FILES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        part = ROWS[10 * number : 10 * number + 10]
        datasets.Dataset.from_list(part).to_parquet(tmp_path / name)
    return tmp_path


def texts(number):
    return [row["text"] for row in ROWS[10 * number : 10 * number + 10]]


def load(folder, name, **more):
    """Load a configuration to train on; return the texts that are trained on, and those of each set."""
    more = {flag: value.format(folder) if isinstance(value, str) else value for flag, value in more.items()}
    config = TextData(path=(str(folder),), name=name, classes=("x", "y", "z"), stream="false", **more)
    tables, _ = labeled_text.load_labelled(config)
    return tables.train["text"][:], {name: table["text"][:] for name, table in tables.sets.items()}


def mixed(folder, *sources, **more):
    """Load sources, each a path below the folder and a configuration; return what `load` does."""
    listed = [
        {
            "name": f"s{number}",
            "path": path if "org" in path else str(folder / path),
            "weight": 1,
            **({"config": name} if name else {}),
        }
        for number, (path, name) in enumerate(sources)
    ]
    (folder / "mix.yaml").write_text(yaml.safe_dump({"sources": listed}))
    more = {flag: value.format(folder) for flag, value in more.items()}
    tables, _ = labeled_text.load_labelled(TextData(mix=str(folder / "mix.yaml"), classes=("x", "y", "z"), **more))
    return tables.train["text"][:], {name: table["text"][:] for name, table in tables.sets.items()}


@pytest.mark.parametrize(
    ("name", "path", "split"),
    [
        *(("one", "{}/a.parquet", ""), ("", "{}/a.parquet", ""), ("two", "{}/b.parquet", ""), ("one", "{}", "")),
        *(("three", "{}/test-d/*.parquet", ""), ("three", "{}/test-d", ""), ("all", "{}/b.parquet", "")),
    ],
)
def test_a_file_of_the_configuration_is_not_evaluated_on(folder, name, path, split):
    with pytest.raises(UserError, match=BOTH) as told:
        load(folder, name, eval_path=path, eval_split=split)
    assert str(told.value).startswith("--data.eval-path") and "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "path", "trained", "scored"),
    [
        *(("one", "{}/b.parquet", [0], 1), ("one", "{}/train-c.parquet", [0], 2), ("", "{}/b.parquet", [0], 1)),
        *(("two", "{}/a.parquet", [1], 0), ("two", "{}/train-c.parquet", [1], 2), ("two", "{}", [1], 2)),
        *(("three", "{}/b.parquet", [3], 1), ("all", "{}/train-c.parquet", [0, 1], 2)),
    ],
)
def test_files_of_other_configurations_and_splits_are(folder, name, path, trained, scored):
    # The split test of two is evaluated on, whatever its file is called.
    train, sets = load(folder, name, eval_path=path)
    assert train == [text for number in trained for text in texts(number)] and sets == {"": texts(scored)}


def test_slices_of_one_configuration_are_its_rows(folder):
    train, sets = load(folder, "one", split="train[:70%]", eval_path="{}", eval_split="train[70%:]")
    assert (train, sets[""]) == (texts(0)[:7], texts(0)[7:])
    with pytest.raises(UserError, match=f"rows 6 to 6 of train would be {BOTH}"):
        load(folder, "one", split="train[:70%]", eval_path="{}", eval_split="train[60%:]")


@pytest.mark.parametrize(
    "sources",
    [
        *([("", "one"), ("a.parquet", "")], [("b.parquet", ""), ("", "two")], [("", "one"), ("", "one")]),
        *([("", "one"), ("", "")], [("", "one"), ("", "all")], [("", "two"), ("train-c.parquet", "")]),
        [("test-d", ""), ("", "three")],
    ],
)
def test_sources_with_a_file_in_common_are_refused(folder, sources):
    with pytest.raises(UserError, match=r"--data.mix: s0 and s1 both read .*without common files"):
        mixed(folder, *sources)


@pytest.mark.parametrize("sources", [[("", "one"), ("", "two")], [("", "one"), ("b.parquet", "")]])
def test_configurations_of_other_files_are_other_data(folder, sources):
    train, sets = mixed(folder, *sources)
    assert {*train}.isdisjoint(sets[""]) and {*train, *sets[""]} >= {*texts(0), *texts(1)}


def test_a_source_with_a_configuration_is_not_evaluated_on(folder):
    for path in ("{}/a.parquet", "{}"):  # where nothing else is said, a folder is its default configuration
        with pytest.raises(UserError, match=BOTH):
            mixed(folder, ("", "one"), ("other.parquet", ""), eval_path=path)
    assert mixed(folder, ("", "one"), eval_path="{}/b.parquet") == (texts(0), {"": texts(1)})


def test_the_default_configuration_of_the_hub_has_its_name(folder, monkeypatch):
    monkeypatch.setattr(
        loading, "builder_of", lambda path, name: datasets.load_dataset_builder(str(folder), name or None)
    )
    config = TextData(path=("org/data",), name="one", classes=("x", "y", "z"), eval_path="org/data")
    with pytest.raises(UserError, match=BOTH):
        labeled_text.load_labelled(config)
    with pytest.raises(UserError, match="s0 and s1 both read org/data,"):
        mixed(folder, ("org/data", ""), ("org/data", "one"))
    train, sets = mixed(folder, ("org/data", "one"), ("org/data", "all"))
    assert len({*train, *sets[""]}) == 20
