"""The folder of a run: what it may hold before, what is never written through, and what is never deleted."""

import json
import os
import shutil

import pytest
from support.damage import contents as contents_of
from support.tiny import saved, train

from app.errors import UserError
from app.rundir import contents
from app.storage import drafts

SECRET = "of somebody else"


def fill(folder, *names):
    """Put files of the user's own there; a name that ends in a slash is a folder with one."""
    for name in names:
        place = folder / name / "inside" if name.endswith("/") else folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(SECRET)


@pytest.mark.parametrize(
    "names",
    [[name] for name in contents.FILES]
    + [[f"{name}/"] for name in contents.FOLDERS]
    + [["notes.txt"], [".git/"], ["config.yaml", "recipe.py", "model/"], ["run.json.tmp.txt"], ["data.log/"]],
    ids=" ".join,
)
def test_a_folder_that_holds_other_things_is_refused(tmp_path, names):
    """Naming what is there, and before anything is written: whichever name of a run the user has taken."""
    folder = tmp_path / "mine"
    folder.mkdir()
    fill(folder, *names)
    before = contents_of(folder), sorted(os.listdir(folder))
    with pytest.raises(UserError, match=rf"--run\.dir .*mine.*{names[0].rstrip('/')}") as refused:
        train(folder)
    assert len(str(refused.value).splitlines()) == 1
    assert (contents_of(folder), sorted(os.listdir(folder))) == before


@pytest.mark.parametrize("text", ["{}", "[1]", '{"status": "done", "recipe": "x"}', '{"status": "running"}', "no json"])
def test_another_programs_run_json_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json"):
        train(tmp_path)
    assert (tmp_path / "run.json").read_text() == text and os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize(
    "name", [".DS_Store", ".gitkeep", ".gitignore", "Thumbs.db", "lost+found/", "slurm-7.out", "log"]
)
def test_what_systems_and_launches_leave_is_no_hindrance(tmp_path, name):
    fill(tmp_path, name)
    before = contents_of(tmp_path)
    train(tmp_path)
    assert before.items() <= contents_of(tmp_path).items() and saved(tmp_path) == [6, 8]


def test_a_file_that_takes_this_process_output_is_no_hindrance(tmp_path):
    """As `> runs/x/output.txt` makes it."""
    (tmp_path / "output.txt").touch()
    kept = os.dup(1)
    with (tmp_path / "output.txt").open("w") as file:
        os.dup2(file.fileno(), 1)
        try:
            contents.check(tmp_path, False)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    with pytest.raises(UserError, match=r"output\.txt"):
        contents.check(tmp_path, False)


def test_a_run_goes_on_whatever_lies_next_to_it(tmp_path):
    """Also where run.json is lost, and one of its checkpoints shows that the folder is a run's."""
    train(tmp_path / "run", stop_at=4)
    fill(tmp_path / "run", "notes.txt", "mine/", "checkpoints/best-of-all/", "images/mine.png", "collectives/mine")
    (tmp_path / "run" / "run.json").unlink()
    (tmp_path / "latest").symlink_to("run")
    before = contents_of(tmp_path / "run")
    train(tmp_path / "latest")
    kept = {path: data for path, data in before.items() if data == SECRET.encode()}
    assert len(kept) == 5 and kept.items() <= contents_of(tmp_path / "run").items()


def test_what_the_run_did_not_write_is_put_aside_and_not_deleted(tmp_path, capsys):
    """In its model, and in a checkpoint that is no longer wanted; a second end of the run deletes its own model."""
    run = tmp_path / "run"
    train(run)
    fill(run, "model/notes.txt", "checkpoints/step-00000006/notes.txt")
    train(run, epochs=3.0)
    assert "notes.txt, which this run did not write: kept in" in capsys.readouterr().out
    notes = sorted(path.relative_to(run) for path in run.rglob("notes.txt"))
    assert [path.parts[0] for path in notes] == ["checkpoints", notes[1].parts[0]]
    assert notes[1].parts[0].startswith("model.") and notes[1].parts[0].endswith(".kept")
    assert (run / notes[1].parent / "model.safetensors").exists() and not (run / "model" / "notes.txt").exists()
    train(run, epochs=4.0)
    assert len([*run.glob("model*")]) == 2 and saved(run) == [14, 16]
    (run / "model" / "model.safetensors").write_text(SECRET)  # a name of the run's, and the user's own contents
    train(run, epochs=5.0)
    assert len([*run.glob("model*")]) == 3


@pytest.mark.parametrize("name", [*contents.FILES, *contents.FOLDERS])
@pytest.mark.parametrize("resumed", [False, True])
def test_no_link_is_followed(tmp_path, name, resumed):
    """Whichever part of the folder it is, in a new folder and in a run's."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    fill(outside, "file", "folder/")
    run.mkdir()
    if resumed:
        train(run, stop_at=4)
        place = run / name
        shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True)
    (run / name).symlink_to(outside / ("folder" if name in contents.FOLDERS else "file"))
    before = contents_of(outside)
    with pytest.raises(UserError, match=rf"{name} is a link"):
        train(run)
    assert contents_of(outside) == before


@pytest.mark.parametrize("part", [".", "state", "state/.metadata", "record.json"])
def test_no_link_in_a_checkpoint_is_followed(tmp_path, part):
    """Nor is a checkpoint that lies elsewhere."""
    run, outside = tmp_path / "run", tmp_path / "outside"
    train(run, stop_at=4)
    place = next((run / "checkpoints").iterdir()) / part
    place.rename(outside)
    place.symlink_to(outside)
    before = contents_of(tmp_path)
    with pytest.raises(UserError, match=rf"checkpoints/{place.relative_to(run / 'checkpoints')} is a link"):
        train(run)
    assert contents_of(tmp_path) == before


def test_a_file_that_is_called_as_the_model_is_kept(tmp_path):
    train(tmp_path / "run", stop_at=4)
    (tmp_path / "run" / "model").write_text("mine")
    train(tmp_path / "run")
    (kept,) = (tmp_path / "run").glob("model.*.kept")
    assert kept.read_text() == "mine" and (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_pictures_and_drafts_follow_no_link(tmp_path):
    """A picture's name may be a link before it is drawn; and the names of drafts cannot be foretold."""
    import numpy as np

    run, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    fill(outside, "file", "folder/")

    def draws(run, model):
        run.log_images({"eval/one": [np.zeros((4, 4), np.uint8)], "two/far": [np.zeros((4, 4), np.uint8)]})

    train(run, draws, stop_at=2)
    (run / "images/eval/one/step-00000003.png").symlink_to(outside / "file")
    shutil.rmtree(run / "images/two/far")
    (run / "images/two/far").symlink_to(outside / "folder")
    for name in contents.FILES:
        (run / f"{name}.tmp").symlink_to(outside / "file")
    before = contents_of(outside)
    train(run, draws)
    assert contents_of(outside) == before
    assert not (run / "images/eval/one/step-00000003.png").is_symlink()
    assert len({drafts.draft_of(run / "run.json") for _ in range(100)}) == 100


def test_a_manifest_leads_to_no_other_file(tmp_path):
    from app.distributed.state import manifest

    train(tmp_path / "run")
    file = tmp_path / "run/checkpoints/step-00000008/manifest.json"
    fields = json.loads(file.read_text())
    for name in ("../step-00000006/record.json", "/etc/hostname", ""):
        file.write_text(json.dumps({**fields, "files": {name: {"size": 1, "xxh3": ""}}}))
        with pytest.raises(ValueError, match="not the list of files"):
            manifest.verify(file.parent)
