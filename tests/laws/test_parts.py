"""Which part of a tensor a rank has: over all placements, each number is counted once."""

import json

from support.launching import ROOT, launch


def test_each_number_is_counted_once(tmp_path):
    """Whole, cut into rows or columns, over one and two dimensions of a mesh, and in rows that are cut twice."""
    result = launch("ddp_cpu", 4, ROOT / "tests" / "laws" / "parts.py", tmp_path)
    assert result.status == 0, result.output[-3000:]
    counted = json.loads((tmp_path / "counted.json").read_text())
    refused = [counted.pop(name) for name in ("copies", "coordinates", "cut_along")]
    assert len(counted) == 3 + 9 + 1 and sum("_" in name or "_S" in name for name in counted) >= 1
    for name, (times, *more, alike) in counted.items():
        cut = 4 // more[-1]
        assert (times, len(more), alike) == (1.0, 1, True) and cut in (1, 2, 4), name
    assert all("neither cut nor copied" in words for words in refused)
