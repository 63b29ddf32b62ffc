"""Laws 1 to 5 for data that are streamed or mixed: the ledger, the bits of exact mode, stops, workers, and rows."""

import functools
import json

import datasets
import pytest
import yaml
from support.launching import ROOT, launch_all, metrics, saved_state, scores, steps, train_all, weights
from support.stream_shards import write_members
from support.token_shards import tokenize, write_rows

CLS, LM = (ROOT / "recipes" / f"{name}.py" for name in ("cls", "lm"))
LAYOUTS = {
    "one": ("cpu", 1),
    "ddp2": ("ddp_cpu", 2),
    "ddp3": ("ddp_cpu", 3),
    "fsdp2": ("fsdp_cpu", 2),
    "fsdp4": ("fsdp_cpu", 4),
}
LARGER = ("ddp2", "fsdp2", "fsdp4")  # `make laws` has them
CHAINED = ("streamed", "corpora")  # cases that begin under FSDP2 x2, go on under DDP x3, and end on one process
OTHERS = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in LARGER)) for name in LAYOUTS if name != "one"]
STEPS, STOPS = 30, (10, 20)
ALL = ["--scratch.width", 32, "--scratch.layers", 1, "--run.log-every", 1, "--run.trackers", "--run.exact", "true"]
ALL += ["--run.save-every", 100, "--run.eval-every", STEPS // 2, "--run.steps", STEPS]
# K is 5, which no number of ranks here divides, with 4 or 5 rows each; epochs end inside a step.
ALL += ["--run.global-batch", 24, "--run.micro-batch", 5]
SMALL = [*ALL, "--scratch.vocab", 300, "--data.max-length", 32, "--optim.lr", 5e-3, "--data.classes", "a", "b", "c"]
OF_LM = [*ALL, "--scratch.heads", 2, "--data.block", 16, "--sample-length", 0]
CASES = ("streamed", "mixed", "tokens", "corpora")


def rows(count, start=0):
    """Return rows of three classes, sorted by class."""
    classes = [3 * i // count for i in range(count)]
    return [
        {"text": f"{'abc'[each]} " * 5 + f"number {start + i}" + " more" * (i % 7), "label": each}
        for i, each in enumerate(classes)
    ]


def write(folder):
    """Write a table of parquet shards in row groups of nine, one of a tar file, and lines, and mix them."""
    folder.mkdir()
    table = datasets.Dataset.from_list(rows(203))
    for number, part in enumerate((range(90), range(90, 91), range(91, 203))):
        (folder / "web").mkdir(exist_ok=True)
        table.select(part).to_parquet(folder / "web" / f"part-{number}.parquet", batch_size=9)
    (folder / "tar").mkdir()
    members = [
        (f"{i:04}.{ending}", str(value).encode())
        for i, row in enumerate(rows(60, 1000))
        for ending, value in (("txt", row["text"]), ("cls", row["label"]))
    ]
    write_members(folder / "tar" / "part-0.tar", members)
    lines = [json.dumps({"sentence": row["text"], "label": row["label"]}) for row in rows(50, 2000)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    (folder / "eval.jsonl").write_text("\n".join(map(json.dumps, rows(7, 3000))))
    mix = {
        "sources": [
            {"name": "web", "path": str(folder / "web"), "weight": 6, "stream": True},
            {"name": "tar", "path": str(folder / "tar"), "weight": 1, "text": "txt", "label": "cls"},
            {"name": "lines", "path": str(folder / "lines.jsonl"), "weight": 2, "text": "sentence", "epochs": 3},
        ],
        "later": [{"from": 0.5, "weights": {"web": 1, "tar": 1}}],
    }
    (folder / "mix.yaml").write_text(yaml.safe_dump(mix))
    write_tokens(folder)
    web, tar, lines = mix["sources"]
    before = {"sources": [web, lines, tar | {"weight": 0}], "later": [{"from": STEPS - 1, "weights": {"tar": 1}}]}
    after = {"sources": [web | {"weight": 1}, lines, tar | {"weight": 2}]}
    ahead = {
        "sources": [web, lines, tar | {"weight": 0}],
        "later": [{"from": STOPS[0], "weights": {"web": 1, "tar": 2}}],
    }
    for name, content in (("before", before), ("after", after), ("ahead", ahead)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder


def write_tokens(folder):
    """Make tokens of a text, and of answers to prompts, in chunks of some blocks, and mix the text's with lines."""
    text = "\n\n".join(f"{row['text']} and {i * i} is the square of {i}." for i, row in enumerate(rows(203)))
    (folder / "text.txt").write_text(text)
    (folder / "eval.txt").write_text(text[:300])
    asked = [{"asked": f"the square of {i}?" * (i % 3), "answer": f"It is {i * i}." * (i % 7)} for i in range(203)]
    write_rows(folder / "asked.jsonl", asked)
    small = ["--tokens-per-chunk", 500, "--tokens-per-shard", 10**6]
    assert tokenize(folder / "text.txt", folder / "tokens", *small, "--data.txt", "blank-lines") == 0
    of_prompts = ["--data.prompt", "asked", "--data.completion", "answer"]
    assert tokenize(folder / "asked.jsonl", folder / "answers", *small, *of_prompts) == 0
    corpora = {
        "sources": [
            {"name": "tokens", "path": str(folder / "tokens"), "weight": 3, "stream": True},
            {"name": "lines", "path": str(folder / "lines.jsonl"), "weight": 1, "text": "sentence"},
        ]
    }
    (folder / "corpora.yaml").write_text(yaml.safe_dump(corpora))


@pytest.fixture(scope="module")
def data(tmp_path_factory, data_cache):
    return write(tmp_path_factory.mktemp("streams") / "data")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data, data_cache):
    """Return a function from a layout and a case to the folder of a run, which the first call for a layout makes."""
    root = tmp_path_factory.mktemp("runs")

    def flags(folder, case, *more):
        of_case = {
            "streamed": ["--data.path", data / "web", "--data.stream", "true"],
            "mapped": ["--data.path", data / "web"],
            # K is 8; micro-batches that are sorted together lie on two of three ranks, and of four.
            "mixed": ["--data.mix", data / "mix.yaml", "--run.micro-batch", 3, "--data.sort-over", 4],
            "tokens": ["--data.path", data / "answers", "--data.stream", "true"],  # the last blocks are held out
            "corpora": ["--data.mix", data / "corpora.yaml"],
            **{name: ["--data.mix", data / f"{name}.yaml"] for name in ("before", "after", "ahead")},
        }
        is_lm = case in ("tokens", "corpora")
        scored = [] if case == "tokens" else ["--data.eval-path", data / ("eval.txt" if is_lm else "eval.jsonl")]
        where = [*scored, "--data.window", 2, "--run.dir", root / folder]
        return LM if is_lm else CLS, [*(OF_LM if is_lm else SMALL), *of_case[case], *where, *more], None

    @functools.cache
    def launched(layout):
        if layout == "one":
            words = [*(flags(f"one/{case}", case) for case in CASES), flags("one/mapped", "mapped", "--run.stop-at", 1)]
            words += [flags("one/workers-1", "streamed", "--run.workers", 1, "--run.steps", 12)]
            words += [flags("one/workers-4", "mixed", "--run.workers", 4, "--run.steps", 12)]
            words += [flags("one/ahead", "ahead")]
            words += [flags("one/changed", "before", "--run.stop-at", STOPS[0]), flags("one/changed", "after")]
            return train_all(*LAYOUTS["one"], words, root)
        words = [flags(f"{layout}/{case}", case) for case in CASES]
        if layout == "ddp3":
            begun = [flags(f"chain/{case}", case, "--run.stop-at", STOPS[0]) for case in CHAINED]
            launch_all(*LAYOUTS["fsdp2"], begun, root, timeout=400)
            words += [flags(f"chain/{case}", case, "--run.stop-at", STOPS[1]) for case in CHAINED]
        launch_all(*LAYOUTS[layout], words, root, timeout=400)

    @functools.cache
    def chained():
        launched("ddp3")
        train_all(*LAYOUTS["one"], [flags(f"chain/{case}", case) for case in CHAINED], root)

    def folder(layout, case):
        chained() if layout == "chain" else launched(layout)
        return root / layout / case

    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", OTHERS)
def test_every_layout_gives_the_same_bits(runs, layout, case):
    """Laws 1 to 3 and 5: ledger, losses, scores, weights and the optimizer's state are those of one process."""
    reference, other = runs("one", case), runs(layout, case)
    assert len(steps(other)) == STEPS and steps(other) == steps(reference)
    assert scores(other) == scores(reference)
    assert saved_state(other, STEPS) == saved_state(reference, STEPS)
    assert weights(other) == weights(reference)


@pytest.mark.parametrize("case", CHAINED)
def test_a_run_goes_on_elsewhere(runs, case):
    """Law 4: FSDP2 x2, then DDP x3, then one process, stopped inside epochs and windows: as if it had never stopped."""
    assert steps(runs("chain", case)) == steps(runs("one", case))
    assert saved_state(runs("chain", case), STEPS) == saved_state(runs("one", case), STEPS)


def test_another_mix_on_resume_is_the_one_that_was_planned_ahead(runs):
    """Each source goes on behind its last sample, a new one begins, and nothing else changes."""
    changed, ahead = runs("one", "changed"), runs("one", "ahead")
    alike = [[{k: v for k, v in line.items() if k != "epoch"} for line in steps(each)] for each in (changed, ahead)]
    assert alike[0] == alike[1]
    assert saved_state(changed, STEPS) == saved_state(ahead, STEPS)
    assert metrics_at(ahead, STEPS)["tar"] > 100 and metrics_at(ahead, STOPS[0])["tar"] == 0
    (segment,) = json.loads((changed / "run.json").read_text())["segments"]
    assert segment["step"] == STOPS[0]
    assert segment["changed"]["data.mix"] == [
        "web 6, lines 2 (at most 150 samples)",
        "web 1, lines 2 (at most 150 samples), tar 2",
    ]


@pytest.mark.parametrize(("workers", "case"), [("workers-1", "streamed"), ("workers-4", "mixed")])
def test_workers_change_nothing(runs, workers, case):
    """Another number of steps changes learning rates, so the ledger is compared, and where the change of mix is not."""
    other = [line["ids"] for line in steps(runs("one", workers))]
    if case == "streamed":
        assert other == [line["ids"] for line in steps(runs("one", case))][:12]
    else:
        assert other[:6] == [line["ids"] for line in steps(runs("one", case))][:6]
    assert len(set(other)) == len(other)


def test_cases_are_what_they_claim(runs):
    """The loss goes down, steps differ, epochs end inside steps, and the mix is the one asked for."""
    for case in CASES:
        lines = steps(runs("one", case))
        assert len({line["ids"] for line in lines}) == STEPS
        assert sum(line["loss"] for line in lines[-9:]) < 0.95 * sum(line["loss"] for line in lines[:9])
    lines = steps(runs("one", "mixed"))
    assert all(0 < line["loss/web"] < 5 and line["loss/web"] != line["loss"] for line in lines)
    for case in ("mixed", "corpora"):
        shares = [{n: v for n, v in line.items() if n.startswith("samples/")} for line in steps(runs("one", case))]
        for line, now, before in zip(steps(runs("one", case))[1:], shares[1:], shares, strict=False):
            new = {name.removeprefix("samples/"): now[name] - before[name] for name in now}
            assert {name for name in new if f"loss/{name}" in line} == {name for name, count in new.items() if count}
            if case == "mixed":  # where rows weigh alike
                mean = sum(count * line.get(f"loss/{name}", 0) for name, count in new.items()) / 24
                assert mean == pytest.approx(line["loss"], rel=1e-5)
    half, whole = (metrics_at(runs("one", "mixed"), step) for step in (STEPS // 2, STEPS))
    count = 24 * STEPS // 2
    assert sum(half.values()) == count and sum(whole.values()) == 2 * count
    assert abs(half["lines"] - count * 2 / 9) <= 5 and abs(half["tar"] - count / 9) <= 5
    assert whole["lines"] == 150  # its three epochs
    assert abs((whole["web"] - half["web"]) - (whole["tar"] - half["tar"])) <= 8
    assert steps(runs("one", "mapped"))[0]["ids"] != steps(runs("one", "streamed"))[0]["ids"]


def metrics_at(folder, step):
    """Return how many samples each source has given."""
    (line,) = [line for line in metrics(folder) if line["step"] == step and "ids" in line]
    return {name.removeprefix("samples/"): value for name, value in line.items() if name.startswith("samples/")}
