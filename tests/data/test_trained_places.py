"""No file is both trained on and evaluated on, in whatever form and by whatever name it is given to each flag."""

import datasets
import pytest
import yaml
from support.stream_shards import write_members

from app.data.config import TextData
from app.data.text import labeled_text
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("own_data_cache")
ROWS = [{"text": f"row {i}", "label": i % 3} for i in range(90)]
FORMS = {"streamed": "true", "mapped": "false", "a streamed source": "true", "a mapped source": "false"}
FLAGS = ("--data.eval-path", "--data.eval-sets")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with two shards to train on, which links lead to too."""
    (tmp_path / "web").mkdir()
    for number in range(2):
        part = datasets.Dataset.from_list(ROWS[40 * number : 40 * number + 40])
        part.to_parquet(tmp_path / "web" / f"train-{number}.parquet", batch_size=5)
    (tmp_path / "linked.parquet").symlink_to(tmp_path / "web" / "train-1.parquet")
    (tmp_path / "linked").symlink_to(tmp_path / "web", target_is_directory=True)
    datasets.Dataset.from_list(ROWS[80:]).to_parquet(tmp_path / "other.parquet")
    return tmp_path


def load(folder, form, flag, path, split="", trained="web"):
    """Load what is trained on and evaluated on, as a flag names it; return the texts of the latter."""
    config = TextData(path=(str(folder / trained),), classes=("x", "y", "z"), stream=FORMS[form])
    if "source" in form:
        source = {"name": "one", "path": str(folder / trained), "weight": 1, "stream": FORMS[form] == "true"}
        (folder / "mix.yaml").write_text(yaml.safe_dump({"sources": [source]}))
        config = TextData(mix=str(folder / "mix.yaml"), classes=("x", "y", "z"))
    if flag == "--data.eval-path":
        config.eval_path, config.eval_split = str(folder / path), split
    else:
        config.eval_path = str(folder / "other.parquet")
        config.eval_sets = (f"more={folder / path}" + (f"::{split}" if split else ""),)
    tables, _ = labeled_text.load_labelled(config)
    return tables.sets["" if flag == "--data.eval-path" else "more"]["text"][:]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize(
    ("path", "split"),
    [
        *(("web", ""), ("web", "train"), ("web/train-1.parquet", ""), ("web/train-*.parquet", ""), ("linked", "")),
        *(
            ("**/*1.parquet", ""),
            ("linked.parquet", ""),
            ("web/../web/train-0.parquet", ""),
            ("web/*[1].parquet", "train"),
        ),
    ],
)
def test_files_that_are_trained_on_are_not_evaluated_on(folder, form, flag, path, split):
    with pytest.raises(UserError, match=r"would be both trained on and evaluated on") as told:
        load(folder, form, flag, path, split)
    assert str(told.value).startswith(flag) and "\n" not in str(told.value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flag", FLAGS)
def test_a_folder_with_a_split_of_its_own_is_taken_for_both(folder, form, flag):
    datasets.Dataset.from_list(ROWS[80:]).to_parquet(folder / "web" / "val.parquet")
    texts = [row["text"] for row in ROWS[80:]]
    for path, split in (("web", ""), ("linked", ""), ("web/val*.parquet", ""), ("web", "validation")):
        assert load(folder, form, flag, path, split) == texts
    with pytest.raises(UserError, match="both trained on and evaluated on"):
        load(folder, form, flag, "web", "train")
    assert load(folder, form, flag, "web/train-0.parquet", trained="web/train-1.parquet") == [
        r["text"] for r in ROWS[:40]
    ]
    with pytest.raises(UserError, match="both trained on and evaluated on"):
        load(folder, form, flag, "web", "train", trained="web/train-1.parquet")


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("path", ["tar", "tar/train-0.tar"])
def test_tar_files_that_are_read_as_a_whole_are_not_evaluated_on_by_chunks(folder, stream, path):
    (folder / "tar").mkdir()
    write_members(folder / "tar" / "train-0.tar", [("0.text.txt", b"row"), ("0.label.txt", b"x")])
    config = TextData(path=(str(folder / "tar"),), eval_path=str(folder / path), classes=("x", "y"), stream=stream)
    config.text, config.label = ("text.txt",), ("label.txt",)
    with pytest.raises(UserError, match=r"train-0.tar would be both trained on and evaluated on"):
        labeled_text.load_labelled(config)
