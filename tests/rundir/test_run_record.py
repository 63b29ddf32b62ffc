"""run.json and manifest.json: what is written is read again, unknown fields stay, and what is wrong is named."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_records import launch, record

from app.commands.runs import command
from app.distributed.layout_record import Layout
from app.distributed.state import manifest
from app.distributed.state.manifest import MANIFEST, Manifest
from app.errors import UserError
from app.rundir import run_record
from app.rundir.run_record import RUN, STATUSES, Compiled, Launch, RunRecord, Segment
from app.rundir.time_spent import Spent
from app.storage.records import FileSum

COUNTS, TEXTS = st.integers(0, 2**40), st.text(max_size=8)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.one_of(st.none(), st.booleans(), COUNTS, NUMBERS, TEXTS, st.lists(COUNTS, max_size=2))
NAMES = {each.name for each in dataclasses.fields(RunRecord)} - {"unknown"}


def unknown_to(kind):
    """Fields that a later version may have."""
    taken = {each.name for each in dataclasses.fields(kind)}
    return st.dictionaries(TEXTS.filter(lambda name: name not in taken), VALUES, max_size=2)


SUMS = st.dictionaries(TEXTS, st.builds(FileSum, COUNTS, TEXTS, unknown=unknown_to(FileSum)), max_size=2)
LAUNCHES = st.builds(Launch, COUNTS, TEXTS, TEXTS, unknown=unknown_to(Launch))
TIMES = [NUMBERS] * 5
SPENT = st.builds(Spent, NUMBERS, COUNTS, TEXTS, COUNTS, COUNTS, *TIMES, saves=COUNTS, unknown=unknown_to(Spent))
CHANGED = st.dictionaries(TEXTS, st.tuples(VALUES, VALUES), max_size=2)
RECORDS = st.builds(
    RunRecord,
    status=st.sampled_from(STATUSES),
    step=COUNTS,
    steps=COUNTS,
    samples=COUNTS,
    recipe=TEXTS,
    layout=st.builds(Layout, COUNTS, wrapping=TEXTS, unknown=unknown_to(Layout)),
    versions=st.dictionaries(TEXTS, TEXTS, max_size=2),
    recipe_folder=TEXTS,
    commit=TEXTS,
    launches=st.lists(LAUNCHES, max_size=3).map(tuple),
    segments=st.lists(st.builds(Segment, COUNTS, CHANGED), max_size=2).map(tuple),
    error=st.none() | TEXTS,
    trackers=st.none() | st.dictionaries(TEXTS, TEXTS, max_size=2),
    compiled=st.none() | st.builds(Compiled, COUNTS, COUNTS, st.lists(TEXTS, max_size=2).map(tuple)),
    metrics=st.none() | st.dictionaries(TEXTS, st.none() | NUMBERS | TEXTS, max_size=2),
    model_files=st.none() | SUMS,
    spent=st.none() | st.lists(SPENT, max_size=2).map(tuple),
    unknown=unknown_to(RunRecord),
)


@given(RECORDS)
def test_what_is_written_is_read_again(saved):
    assert RunRecord.from_json(json.loads(json.dumps(saved.to_json()))) == saved


@given(st.builds(Manifest, SUMS, unknown=unknown_to(Manifest)))
def test_a_manifest_is_read_again(saved):
    assert Manifest.from_json(json.loads(json.dumps(saved.to_json()))) == saved


@given(RECORDS, st.sampled_from(sorted(NAMES)), st.one_of(VALUES, st.dictionaries(TEXTS, VALUES, max_size=2)))
def test_a_field_of_any_value_is_read_or_named(saved, name, value):
    try:
        RunRecord.from_json({**saved.to_json(), name: value})
    except ValueError as error:
        assert name in str(error) or "newer" in str(error)


def write(folder, **changes):
    """Write a run.json with some fields changed; those that are ... are left out."""
    fields = {**record().to_json(), **changes}
    (folder / RUN).write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"step": ...}, "it has no field step"),
        ({"step": -1}, "its step is -1, not a whole number"),
        ({"status": "done"}, "its status is 'done', not one of running, finished, preempted, failed"),
        ({"launches": {}}, "its launches is {}, not a list"),
        ({"launches": [launch().to_json(), {"step": 3}]}, r"its launches\[1\] has no field began"),
        ({"launches": [{**launch().to_json(), "step": "3"}]}, r"its launches\[0\]\.step is '3', not a whole number"),
        (
            {"segments": [{"step": 3, "changed": {"optim.lr": [1]}}]},
            r"its segments\[0\]\.changed\.optim\.lr is \[1\], not a list of 2",
        ),
        ({"metrics": {"eval/x": []}}, r"its metrics\.eval/x is \[\], not a number or a text"),
        ({"layout": {**Layout().to_json(), "processes": 1.5}}, r"its layout\.processes is 1\.5, not a whole number"),
        ({"model_files": {"a": {"size": 1}}}, r"its model_files\.a has no field xxh3"),
        ({"trackers": {"wandb": 3}}, "its trackers.wandb is 3, not a text"),
        ({"versions": None}, "its versions is None, not an object"),
    ],
)
def test_a_damaged_field_is_named_with_its_file_and_place(tmp_path, changes, words):
    write(tmp_path, **changes)
    with pytest.raises(UserError, match=rf"run\.json is damaged, or another program's: {words}.*writes it anew"):
        run_record.read(tmp_path)


def test_a_damaged_run_is_listed_as_such(tmp_path, capsys):
    """Another program's run.json is passed over."""
    for name, changes in {"whole": {}, "damaged": {"launches": 3}, "theirs": {"status": "ok"}}.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, **changes)
    assert command.main(command.Options((tmp_path,))) == 0
    printed = capsys.readouterr().out
    assert "whole" in printed and "theirs" not in printed
    assert f"left out: {tmp_path / 'damaged' / RUN} is damaged" in printed and "its launches is 3" in printed


def test_a_record_without_a_format_is_of_the_first_and_a_newer_one_is_named(tmp_path):
    write(tmp_path, format=...)
    assert run_record.read(tmp_path) == record()
    write(tmp_path, format="2999-01", launches="of another kind")
    with pytest.raises(UserError, match="a newer version wrote it"):
        run_record.read(tmp_path)


def test_a_launch_keeps_what_earlier_ones_have_said():
    """Launches and settings up to its step, what it does not say itself, and fields that this version does not know."""
    segments = (Segment(3, {}), Segment(6, {}))
    before = record(6, launches=(launch(0), launch(6)), segments=segments, trackers={"wandb": "x"}, unknown={"new": 1})
    after = record(6, launches=(launch(6, "there"),), unknown={"attention": "mask"}).after(before)
    assert [each.layout for each in after.launches] == [launch().layout] * 2 + ["there"]
    assert after.segments == segments[:1] and after.trackers == {"wandb": "x"}
    assert after.unknown == {"new": 1, "attention": "mask"}
    anew = record(0).after(before)
    assert anew.launches == (launch(),) and anew.segments == ()


@pytest.mark.parametrize(
    "files, words",
    [
        ({"a": {"size": 1}}, r"its files\.a has no field xxh3"),
        ({"a": {"size": "1", "xxh3": ""}}, r"its files\.a\.size is '1', not a whole number"),
        ([], r"its files is \[\], not an object"),
        ({"../a": {"size": 1, "xxh3": ""}}, "does not lie in the folder"),
    ],
)
def test_a_damaged_manifest_is_named_with_its_place(tmp_path, files, words):
    (tmp_path / MANIFEST).write_text(json.dumps({**Manifest({}).to_json(), "files": files}))
    with pytest.raises(ValueError, match=rf"manifest\.json is not the list of files that was written: .*{words}"):
        manifest.listed(tmp_path)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"status": "x"}, r"run.note\(status=...\): run.json has a field status"),
        ({"a": 1, "b": object()}, r"run.note\(b=...\): it cannot be kept in run.json"),
        ({"b": [0] * run_record.MOST_FACTS}, r"run.note\(b=...\): it cannot be kept in run.json \(too many values"),
        ({"b": "x" * run_record.LARGEST_FACT}, r"run.note\(b=...\): it has 16,777,218 bytes"),
        ({"a": [0] * 30_000, "b": [0] * 30_000}, r"run.note\(b=...\): it makes the facts of this run more than 50,000"),
    ],
)
def test_facts_that_could_not_be_read_again_are_refused(facts, says):
    with pytest.raises(UserError, match=says):
        run_record.check_facts(facts)


def test_the_most_that_may_be_noted_is_read_again(tmp_path):
    facts = {"a": [0] * (run_record.MOST_FACTS - 3), "b": "x" * 100_000}
    run_record.check_facts(facts)
    saved = dataclasses.replace(record(), unknown=facts)
    (tmp_path / RUN).write_text(json.dumps(saved.to_json()))
    assert run_record.read(tmp_path).unknown["a"] == facts["a"]
