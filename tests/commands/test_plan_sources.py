"""What a plan says of data that are streamed or mixed: what machines fetch and hold, and what each source gives."""

import json
from dataclasses import replace

import datasets
import numpy as np
import pytest
import yaml
from support.launching import PROFILES, ROOT

from app import UserError
from app.__main__ import main
from app.commands.plan import sources
from app.config import RunConfig
from app.data.streams.opening import stream
from app.launching import profiles
from app.sampling.batch_plan import BatchPlan

pytestmark = pytest.mark.usefixtures("own_data_cache")
SMALL = (
    "--data.classes a b --scratch.layers 1 --scratch.width 32 --scratch.vocab 300 --data.max-length 32 --run.trackers"
)


@pytest.fixture
def folder(tmp_path):
    """Return a folder of shards in 20 chunks of five rows."""
    (tmp_path / "web").mkdir()
    table = datasets.Dataset.from_list([{"text": f"row {i} " * 9, "label": i % 2} for i in range(100)])
    for number in range(2):
        part = table.select(range(50 * number, 50 * number + 50))
        part.to_parquet(tmp_path / "web" / f"{number}.parquet", batch_size=5)
    lines = [json.dumps({"text": f"line {i}", "label": i % 2}) for i in range(40)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    return tmp_path


def planned(folder, window=2, **more):
    rows = stream(str(folder / "web"), window=window, **more)
    plan = BatchPlan.of_run(RunConfig(global_batch=20, micro_batch=4, epochs=2.0), len(rows))
    return plan.ordered(rows.order(plan)), sources.read_by_chunks(rows)


def profile(processes, machines):
    of_file = profiles.read(str(PROFILES / "ddp_cpu.yaml"))
    return replace(of_file, processes=processes, settings={**of_file.settings, "num_machines": machines})


def test_a_machine_fetches_the_chunks_of_its_own_lanes(folder):
    """Five lanes of twenty rows, and so of four chunks, as an epoch is cut; borders inside a chunk are read twice."""
    plan, read = planned(folder)
    size = read[0].index.size
    (alone,) = sources.fetched(plan, read, profile(2, 1))
    assert (alone.an_epoch, alone.lanes, alone.once) == (size.sum(), 5, True)
    (one_of_two,) = sources.fetched(plan, read, profile(4, 2))
    chunks = [plan.order.chunks_of(lane, 0) for lane in range(5)]
    assert [len(each) for each in chunks] == [4] * 5
    # Four ranks have two turns each: lanes 0 to 3 are of the first machine, and one is of the second.
    assert one_of_two.lanes == 4 and not one_of_two.once
    assert one_of_two.an_epoch == size[np.concatenate(chunks[:4])].sum()


def test_a_small_cache_fetches_in_each_epoch_and_too_small_a_one_is_refused(folder):
    _, (read,) = planned(folder, window=1)
    needed = read.working_set(5)
    assert needed < read.working_set(20)
    plan, few = planned(folder, window=1, cache_gb=(needed + 1) / 1e9)
    (alone,) = sources.fetched(plan, few, profile(1, 1))
    assert not alone.once and alone.cache == int(needed) and alone.an_epoch == read.index.size.sum()
    plan, few = planned(folder, window=1, cache_gb=needed / 2e9)
    with pytest.raises(UserError, match=r"--data.cache-gb: it allows .* for each of 5 micro-batches"):
        sources.fetched(plan, few, profile(1, 1))
    assert sources.fetched(plan, few, profile(5, 5))[0].lanes == 1


def test_the_plan_of_a_mixture_says_what_each_source_gives(folder, capsys):
    mix = {
        "sources": [
            {"name": "web", "path": str(folder / "web"), "weight": 3, "stream": True},
            {"name": "lines", "path": str(folder / "lines.jsonl"), "weight": 1, "epochs": 2},
        ]
    }
    (folder / "mix.yaml").write_text(yaml.safe_dump(mix))
    words = f"--data.mix {folder}/mix.yaml --data.window 2 --run.global-batch 20 --run.micro-batch 5 --run.steps 12"
    words += f" --run.dir {folder}/run --json {folder}/plan.json --profile {PROFILES}/cpu.yaml {SMALL}"
    assert main(["plan", str(ROOT / "recipes" / "cls.py"), *words.split()]) == 0
    plan, said = json.loads((folder / "plan.json").read_text()), capsys.readouterr().out
    web, lines = plan["sources"]
    assert web["samples"] + lines["samples"] == 240 and lines["samples"] == pytest.approx(60, abs=4)
    assert lines["epochs"] == lines["samples"] / 36 and lines["chunks"] is None
    assert web["chunks"]["chunks"] == 18 and web["chunks"]["in_use"] == 8  # a tenth is held out
    assert "web: shards: train 2 (0.parquet, 1.parquet)\n" in said
    assert f"source         web: {web['samples']} samples" in said and "cpu: a machine fetches" in said
    (fetching,) = plan["layouts"][0]["fetching"]
    assert fetching["source"] == "web" and fetching["an_epoch"] == web["chunks"]["stored"]
    assert not (folder / "run").exists()


def test_tables_that_are_read_as_a_whole_have_no_such_lines():
    plan = BatchPlan.of_run(RunConfig(global_batch=20, micro_batch=4), 100)
    assert sources.described(plan, sources.read_by_chunks([1, 2])) == []
    assert sources.fetched(plan, [None], profile(1, 1)) == []
