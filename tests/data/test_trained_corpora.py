"""No text or token of a corpus is both trained on and evaluated on, of one source or of a mixture."""

import pytest
import yaml
from support.token_shards import write_tokens

from app.config.needs import EVERYTHING
from app.data.config import CorpusData
from app.data.corpus import mixed_corpora, token_sets
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("own_data_cache")
TEXTS = [f"the square of {i} is {i * i}" for i in range(60)]


@pytest.fixture
def folder(tmp_path):
    """Return a folder with two files of texts, and two folders of tokens."""
    for number, name in enumerate("ab"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{number} {text}"}}\n' for text in TEXTS))
        write_tokens(tmp_path / f"tokens-{name}", [f"{number} {text}" for text in TEXTS])
    return tmp_path


def load(folder, paths, eval_path="", eval_set=""):
    """Load paths to train on, several as a mixture, and the sets to evaluate on."""
    config = CorpusData(block=8, eval_path=eval_path and str(folder / eval_path))
    config.eval_sets = (f"more={folder / eval_set}",) if eval_set else ()
    if isinstance(paths, str):
        config.path = (str(folder / paths),)
        return token_sets.load(config, ["text"], EVERYTHING)
    sources = [{"name": f"s{i}", "path": str(folder / path), "weight": 1} for i, path in enumerate(paths)]
    (folder / "mix.yaml").write_text(yaml.safe_dump({"sources": sources}))
    config.mix = str(folder / "mix.yaml")
    return mixed_corpora.load(config, ["text"], EVERYTHING)


@pytest.mark.parametrize("paths", [("a.jsonl", "a.jsonl"), ("tokens-a", "tokens-a")])
def test_sources_that_share_a_file_are_refused_where_some_is_held_out(folder, paths):
    with pytest.raises(UserError, match=rf"^--data.mix: s0 and s1 both read .*{paths[0]}, so what one holds out"):
        load(folder, paths)
    other = "b.jsonl" if "a.jsonl" in paths else "tokens-b"
    assert load(folder, paths, eval_path=other).evaluation is not None
    assert load(folder, (paths[0], other)).held_out


# Texts that are no mixture are read as any table: tests/data/test_trained_places.py
@pytest.mark.parametrize(("of", "mixed"), [("{}.jsonl", True), ("tokens-{}", True), ("tokens-{}", False)])
@pytest.mark.parametrize("flag", ["eval_path", "eval_set"])
def test_what_is_trained_on_is_not_evaluated_on(folder, of, mixed, flag):
    own, other = of.format("a"), of.format("b")
    flags = {"eval_path": other, flag: own}
    with pytest.raises(UserError, match=r"both trained on and evaluated on|these tokens are trained on too") as told:
        load(folder, (own,) if mixed else own, **flags)
    assert str(folder / own) in str(told.value)
    assert load(folder, (own,) if mixed else own, **{**flags, flag: other}).sets[""] is not None
