"""What a run over a mixture accepts when it is resumed, and what it refuses: sources, their rows, lanes and flags."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import yaml
from support.launching import metrics
from torch import nn

from app import OptimConfig, Run, RunConfig, UserError
from app.data.config import TextData
from app.data.mixtures.joined import MixedRows
from app.data.mixtures.mix_file import read_mix
from app.sampling.orders import ByChunks

A, B, C = (list(torch.randn(20, 4, generator=torch.Generator().manual_seed(seed))) for seed in range(3))


class Chunked(list):
    """Rows that are read by chunks of four."""

    def order(self, plan):
        return ByChunks(np.full(5, 4), plan.micro_batches_per_step, 2, plan.seed)


@dataclass
class Config:
    run: RunConfig
    data: TextData = field(default_factory=TextData)
    optim: OptimConfig = field(default_factory=OptimConfig)


def train(folder, sources, stop_at=0, weights=None, flags=None, **settings):
    """Train six steps over a mixture of `sources`, rows by name; or over rows, if that is what they are."""
    settings = {"global_batch": 8, "micro_batch": 4, "steps": 6, "log_every": 1, "trackers": (), **settings}
    flags, rows = flags or {}, sources
    if isinstance(sources, dict):
        file = folder.parent / flags.setdefault("mix", "mix.yaml")
        named = [{"name": name, "path": name, "weight": (weights or {}).get(name, 1)} for name in sources]
        file.write_text(yaml.safe_dump({"sources": named}))
        rows = MixedRows(read_mix(TextData(), str(file)), list(sources.values()))
    with Run(Config(RunConfig(dir=str(folder), stop_at=stop_at, **settings), TextData(**flags))) as run:
        model, optimizer = run.prepare(nn.Linear(4, 4), OptimConfig())
        for batch in run.batches(rows, torch.stack):
            for micro in batch.micros(model):
                run.backward((model(micro.inputs) - 1).square().mean(), micro)
            run.step(optimizer)
        run.finish(model)


def given(folder):
    """Return how many samples each source has given, by steps."""
    lines = [line for line in metrics(folder) if "samples" in line]
    return {line["step"]: {k.removeprefix("samples/"): v for k, v in line.items() if "samples/" in k} for line in lines}


def segments(folder):
    return json.loads((folder / "run.json").read_text())["segments"]


@pytest.fixture
def begun(tmp_path):
    """Give a folder with the first three steps of a run over two mapped sources."""
    train(tmp_path / "run", {"a": A, "b": B}, stop_at=3)
    return tmp_path / "run"


REFUSED = {
    "rows that two sources have exchanged": ({"a": B, "b": A}, {}, "the training data have changed"),
    "a source that is gone": ({"a": A}, {}, "over a mixture of a, b, and now it is of a: keep the sources"),
    "sources in another order": ({"b": B, "a": A}, {}, "keep the sources in their order"),
    "a new source between others": ({"a": A, "c": C, "b": B}, {}, "name new ones last"),
    "another number of rows": ({"a": A, "b": B[:19]}, {}, "of which a source has other rows than it had"),
    "a source that is streamed now": ({"a": A, "b": Chunked(B)}, {}, "were all mapped, and now one is streamed"),
    "one data set": (A, {}, "holds a run over a mixture, and now there is one data set"),
    "other micro-batches": ({"a": A, "b": B}, {"micro_batch": 2}, "run.micro_batch: 4 before, 2 now"),
    "another global batch": ({"a": A, "b": B}, {"global_batch": 16}, "run.global_batch: 8 before, 16 now"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(begun, what):
    sources, settings, said = REFUSED[what]
    before = sorted(begun.rglob("*"))
    with pytest.raises(UserError, match=said):
        train(begun, sources, **settings)
    assert sorted(begun.rglob("*")) == before


@pytest.mark.parametrize("settings", [{"micro_batch": 2}, {"global_batch": 16}])
def test_other_lanes_of_a_streamed_source_are_not_accepted_either(tmp_path, settings):
    """Each source is dealt to as many lanes as a step has micro-batches, so it would begin anew."""
    train(tmp_path / "run", {"a": A, "b": Chunked(B)}, stop_at=3)
    with pytest.raises(UserError, match=r"before, \d+ now"):
        train(tmp_path / "run", {"a": A, "b": Chunked(B)}, changed="accept", **settings)


def test_a_source_that_is_mapped_again_is_refused(tmp_path):
    train(tmp_path / "run", {"a": A, "b": Chunked(B)}, stop_at=3)
    with pytest.raises(UserError, match="had a streamed one, and now have none"):
        train(tmp_path / "run", {"a": A, "b": B})


def test_a_mixture_in_place_of_one_data_set_is_refused(tmp_path):
    train(tmp_path / "run", A, stop_at=3)
    with pytest.raises(UserError, match="holds a run over one data set, and now there is a mixture"):
        train(tmp_path / "run", {"a": A, "b": B})


def test_a_new_source_begins_and_the_others_go_on(begun):
    before = given(begun)[3]
    train(begun, {"a": A, "b": B, "c": C}, weights={"c": 2})
    last = given(begun)[6]
    assert last["c"] >= 11 and last["a"] + last["b"] + last["c"] == 48
    assert all(before[name] < last[name] <= before[name] + 7 for name in "ab")
    (segment,) = segments(begun)
    assert segment["step"] == 3 and segment["changed"] == {"data.mix": ["a 1, b 1", "a 1, b 1, c 2"]}


def test_the_name_of_the_file_is_no_change_and_neither_is_what_damaged_chunks_do(begun, tmp_path):
    """On resume `mix` and `bad` are taken as they are: the run is the one that was not stopped."""
    train(begun, {"a": A, "b": B}, flags={"mix": "other.yaml", "bad": "skip"})
    assert [change for segment in segments(begun) for change in segment["changed"] if change == "data.mix"] == []
    train(tmp_path / "whole", {"a": A, "b": B})
    lines, whole = ([line for line in metrics(folder) if "ids" in line] for folder in (begun, tmp_path / "whole"))
    assert [(line["ids"], line["loss"]) for line in lines] == [(line["ids"], line["loss"]) for line in whole]
