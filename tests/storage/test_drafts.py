"""app.storage.drafts: what has a name is whole, a failure leaves what was, and no draft stays."""

import os
import re
from pathlib import Path

import pytest

from app.storage import drafts


def make(path: Path, text: str, folder: bool) -> None:
    if folder:
        path.mkdir(parents=True)
        path = path / "inside"
    path.write_text(text)


def text_of(path: Path) -> str:
    return (path / "inside" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("folder", [False, True])
def test_a_draft_takes_its_name_when_the_block_has_succeeded(tmp_path, folder):
    path = tmp_path / "name"
    if not folder:
        path.write_text("before")
    with drafts.drafted(path) as draft:
        make(draft, "now", folder)
        assert draft.parent == tmp_path and path.exists() != folder
    assert text_of(path) == "now" and os.listdir(tmp_path) == ["name"]


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_and_no_draft(tmp_path, folder, error):
    path = tmp_path / "name"
    path.write_text("before")
    with pytest.raises(error), drafts.drafted(path) as draft:
        make(draft, "now", folder)
        raise error
    assert text_of(path) == "before" and os.listdir(tmp_path) == ["name"]


def test_the_draft_of_a_killed_process_is_not_mixed_in(tmp_path):
    for name in ("name.tmp", drafts.draft_of(tmp_path / "name").name):
        make(tmp_path / name, "of the killed one", folder=True)
    assert len(drafts.drafts_of(tmp_path / "name")) == 2
    with drafts.drafted(tmp_path / "name") as draft:
        draft.mkdir()
    assert list((tmp_path / "name").iterdir()) == []


def test_a_durable_file_is_on_disk_before_it_has_its_name(tmp_path, flushes_and_renames):
    drafts.write(tmp_path / "name", "text", durable=True)
    draft, *rest = flushes_and_renames
    assert re.fullmatch(r"name\.[0-9a-f]{16}\.tmp", draft) and rest == ["rename", tmp_path.name]


def test_drafts_differ(tmp_path):
    names = {drafts.draft_of(tmp_path / "name") for _ in range(100)}
    assert len(names) == 100 and all(d.name.startswith("name.") and d.suffix == ".tmp" for d in names)


def test_a_deleted_folder_loses_its_name_first(tmp_path, monkeypatch):
    """A process that is killed while it deletes leaves nothing under the name."""
    make(tmp_path / "name", "text", folder=True)
    monkeypatch.setattr(drafts, "delete", lambda path: None)
    drafts.delete_folder(tmp_path / "name")
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
