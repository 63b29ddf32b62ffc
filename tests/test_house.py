"""CONTRIBUTING.md names every module of app, and no other."""

import re

from launching import ROOT


def test_every_module_has_its_place_in_the_table():
    table = [line.split("|")[1] for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line[:3] == "| `"]
    named = {name.rpartition("/")[2] for cell in table for name in re.findall(r"`([\w/]+\.py)`", cell)}
    there = {path.name for path in (ROOT / "app").glob("*.py")} - {"__init__.py"}
    assert named == there
