"""record.json: what is written is read again, unknown fields stay, and what is missing or wrong is named."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.checkpoints import record
from app.checkpoints.record import FORMAT, RECORD, Counts, DataRecord, Record

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text(max_size=8)
KNOWN = {each.name for each in dataclasses.fields(Record)}
RECORDS = st.builds(
    Record,
    step=st.integers(0, 10**9),
    metrics=st.dictionaries(NAMES, NUMBERS, max_size=3),
    unevaluated=st.booleans(),
    counts=st.builds(Counts, st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    data=st.builds(DataRecord, st.integers(0, 9), NAMES, st.dictionaries(NAMES, NUMBERS, max_size=2)),
    buffers=st.lists(NAMES, max_size=3),
    format=st.just(FORMAT),
    unknown=st.dictionaries(NAMES.filter(lambda name: name not in KNOWN), NUMBERS, max_size=3),
)


@given(RECORDS)
def test_what_is_written_is_read_again(saved):
    assert Record.from_json(json.loads(json.dumps(saved.to_json()))) == saved


@pytest.mark.parametrize("name", sorted(KNOWN - {"unknown", "format"}))
def test_a_field_that_is_missing_or_wrong_is_named(name, tmp_path):
    fields = Record(4).to_json()
    for change in ({}, {name: None}, {name: "words" if name != "format" else 3}):
        (tmp_path / RECORD).write_text(json.dumps({**{k: v for k, v in fields.items() if k != name}, **change}))
        with pytest.raises(ValueError, match=rf"record.json is not the record that was written: it.* {name}\b"):
            record.read(tmp_path)


def test_a_newer_format_is_named(tmp_path):
    (tmp_path / RECORD).write_text(json.dumps({**Record(4).to_json(), "format": "2999-01"}))
    with pytest.raises(ValueError, match="a newer version wrote it"):
        record.read(tmp_path)
