"""app.data.fingerprint: the same data are known again anywhere, other data are not, and looking changes nothing."""

import copy
import hashlib
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tables import python

from app.data.fingerprint import ROWS, contents, difference, places

IMAGE = """
from PIL import Image
def image(row): return Image.new("RGB", (3, 2), (row % 256, 1, 2))
"""
MAKE = (
    IMAGE
    + """
import datasets, numpy as np, torch
N = range(200)
def tensors(): return [{"x": torch.full((2, 3), float(i), dtype=torch.bfloat16), "y": torch.tensor(i)} for i in N]
def arrays(): return [(np.arange(i, i + 3, dtype=np.int16)[::-1], np.float32(i), {"a": [i, None]}) for i in N]
def images(): return [(image(i), i % 3) for i in N]
def strings(): return [f"text {i} \\udcff é" for i in N]
def hub(): return datasets.Dataset.from_dict({"text": [f"text {i}" for i in N], "label": list(N)})
"""
)
KINDS = ("tensors", "arrays", "images", "strings", "hub")


def make(kind: str):
    space: dict = {}
    exec(MAKE, space)
    return space[kind]()


def test_the_same_data_are_the_same_in_every_process():
    """Hashes of strings and times of caches are not."""
    code = f"{MAKE}\nimport json\nfrom app.data.fingerprint import contents\n"
    code += f"print(json.dumps([contents(globals()[kind]()) for kind in {KINDS}]))"
    there = json.loads(python(code, PYTHONHASHSEED="1"))
    for kind, found in zip(KINDS, there, strict=True):
        here = contents(make(kind))
        assert found == json.loads(json.dumps(here)) and len(here["rows"]) >= ROWS - 2 and not here["random"]
        assert difference(here, found) == ""


CHANGES = {
    "tensors": lambda row: row["x"].view(torch.uint8)[0].add_(1),
    "arrays": lambda row: row[2]["a"].append(0),
    "images": lambda row: row[0].putpixel((1, 1), (9, 9, 9)),
}


@pytest.mark.parametrize(("kind", "field"), [("tensors", "x"), ("arrays", "2"), ("images", "0")])
def test_one_changed_row_is_named_with_its_field(kind, field):
    data = make(kind)
    before = contents(data)
    CHANGES[kind](data[0])
    assert difference(before, contents(data)) == (
        f"1 of {len(before['rows'])} rows that were compared differ in {field}; the first is row 0"
    )


@pytest.mark.parametrize(
    "pair",
    [
        (1, True),
        (1, 1.0),
        ("1", b"1"),
        ((1, 2), ((1, 2),)),
        (["ab", "c"], ["a", "bc"]),
        ([["a"], "b"], [["a", "b"], ""]),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (np.zeros(2, np.float32), np.zeros(2, np.int32)),
        (torch.zeros(2), np.zeros(2, np.float32)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
    ],
    ids=str,
)
def test_other_values_have_other_digests(pair):
    a, b = (contents([value]) for value in pair)
    assert difference(a, b) and difference(b, a)


@settings(derandomize=True, deadline=None, database=None)
@given(st.integers(1, 10**12))
def test_rows_are_chosen_by_the_size_alone(size):
    chosen = places(size)
    assert chosen == places(size) and min(size, ROWS - 2) <= len(chosen) <= ROWS
    assert chosen == sorted(set(chosen)) and chosen[0] == 0 and chosen[-1] == size - 1


class Augmented:
    """Rows that are random by construction: from the process's generators, one of its own, and one below it."""

    def __init__(self, rows, inner=None):
        self.rows, self.inner, self.opened = rows, inner, None
        self.generator, self.torch = np.random.default_rng(0), torch.Generator()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.opened = self.opened or "a file"
        draws = [random.random(), np.random.rand(), torch.rand(1), self.generator.random()]
        draws += [torch.rand(1, generator=self.torch)]
        return {"x": draws, "label": self.rows[index], **({"inner": self.inner[index]} if self.inner else {})}


def randomness():
    numpy = np.random.get_state()
    text = f"{random.getstate()} {numpy[1].tolist()} {numpy[2:]} {torch.get_rng_state().tolist()}"
    return hashlib.sha256(text.encode()).hexdigest()


def state(data):
    return [data.opened, data.generator.bit_generator.state, data.torch.get_state().tolist()]


def test_random_fields_are_left_out_and_nothing_is_drawn():
    data = Augmented(list(range(99)), Augmented(list(range(99))))
    before, untouched = randomness(), [copy.deepcopy(state(d)) for d in (data, data.inner)]
    first = contents(data)
    assert randomness() == before
    assert [state(d) for d in (data, data.inner)] == untouched
    random.random(), torch.rand(1)
    assert first["random"] == ["inner", "x"] and difference(first, contents(data)) == ""
    data.rows[0] = -1
    assert "in label; the first is row 0" in difference(first, contents(data))


def test_what_one_launch_finds_random_is_not_compared():
    """A rare augmentation may show in one of two launches."""
    data = Augmented(list(range(99)))
    steady = contents([{"x": [0.5], "label": i} for i in range(99)])
    assert difference(steady, contents(data)) == difference(contents(data), steady) == ""


class Counted:
    def __init__(self, size, fingerprint=None):
        self.size, self.fingerprint, self.read = size, fingerprint, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return index % 7


def test_large_data_are_read_as_little_as_small_ones():
    data = Counted(10**12)
    contents(data)
    assert len(data.read) <= 2 * ROWS


def test_a_fingerprint_of_its_own_finds_what_no_row_shows():
    a, b, unknown = (contents(Counted(1000, name)) for name in ("aa", "bb", None))
    assert difference(a, b) == "the hash of all rows was aa, now it is bb"
    assert difference(a, unknown) == difference(unknown, b) == ""
