"""Runs compared by score and settings, the checkpoints of one run, and the best one of them."""

import json
import os
import re
import shutil

import pytest
from support.run_records import launch
from support.tiny import state_folder, train

from app.__main__ import main as app
from app.commands.export import command as export
from app.commands.runs import command
from app.errors import UserError
from app.rundir import history


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make three runs: the best score of the first is in its middle; the last two have no scores."""
    root = tmp_path_factory.mktemp("runs")

    def scored(run, model):
        if run.steps_done % 2 == 0:
            run.log({"eval/accuracy": {2: 0.5, 4: 0.9, 6: 0.7, 8: 0.6}[run.steps_done]})

    train(root / "scored", scored, best="eval/accuracy", keep=1, log_every=4)
    train(root / "small", micro_batch=2)
    train(root / "large", global_batch=20)
    return root


def shown(capsys, *folders, **options):
    """Run the command; return its status and the lines that it prints."""
    status = command.main(command.Options(folders, **options))
    return status, capsys.readouterr().out.splitlines()


def names(lines):
    return [re.search(r"(scored|small|large)\b", line)[1] for line in lines[2:5]]


def test_the_best_score_and_its_step_are_listed(folder, capsys):
    best = history.read(folder / "scored").best
    assert best == history.Best("eval/accuracy", 0.9, 4, lower=False)
    _, lines = shown(capsys, folder)
    assert any(re.search(r"scored +finished +8/8 +eval/accuracy 0.6 +0.9 at 4 ", line) for line in lines)


def test_lower_is_better_where_the_run_or_the_name_says_so(tmp_path):
    def scored(run, model):
        run.log({"eval/loss": abs(run.steps_done - 3), "eval/x": abs(run.steps_done - 5)})

    train(tmp_path / "loss", scored)
    assert history.read(tmp_path / "loss").best == history.Best("eval/loss", 0, 3, lower=True)
    train(tmp_path / "minus", scored, best="-eval/x")
    assert history.read(tmp_path / "minus").best == history.Best("eval/x", 0, 5, lower=True)
    train(tmp_path / "plus", scored, best="eval/x")
    assert history.read(tmp_path / "plus").best == history.Best("eval/x", 4, 1, lower=False)


def test_settings_are_columns(folder, capsys, tmp_path):
    out = tmp_path / "runs.json"
    _, lines = shown(capsys, folder, columns=("run.micro-batch", "--run.best"), json=str(out))
    assert re.search(r"run\.micro_batch +run\.best", lines[0])
    assert any(re.search(r"small .* 2 ", line) for line in lines)
    rows = {row["folder"].rsplit("/", 1)[1]: row for row in json.loads(out.read_text())["runs"]}
    assert rows["small"]["settings"] == {"run.micro_batch": 2, "run.best": ""}
    assert rows["scored"]["best"] == {"eval/accuracy": 0.9, "step": 4}
    with pytest.raises(UserError, match=r"--columns run.microbatch: .*did you mean run.micro_batch"):
        shown(capsys, folder, columns=("run.microbatch",))


def test_runs_are_sorted(folder, tmp_path, capsys):
    root = shutil.copytree(folder, tmp_path / "runs")
    record, log = root / "small" / "run.json", root / "small" / "metrics.jsonl"
    changed = {"step": 2, "status": "failed", "launches": [launch(layout="3 data ranks, fp32, cpu").to_json()]}
    record.write_text(json.dumps(json.loads(record.read_text()) | changed))
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    for age, name in enumerate(["large", "scored", "small"]):
        os.utime(root / name / "metrics.jsonl", (10**9 - age, 10**9 - age))
        os.utime(root / name / "run.json", (10**9 - age, 10**9 - age))
    names_of = {by: names(shown(capsys, root, sort=by)[1]) for by in ("run", "-run", "changed", "-changed")}
    assert names_of["run"] == names_of["changed"] == ["large", "scored", "small"]
    assert names_of["-run"] == names_of["-changed"] == ["small", "scored", "large"]
    ends = {"best": (0, "scored"), "score": (0, "scored"), "steps": (0, "small"), "-steps": (2, "small")}
    ends |= {"status": (0, "small"), "-status": (2, "small"), "-layout": (0, "small"), "layout": (2, "small")}
    ends |= {"run.global-batch": (2, "large"), "-run.global-batch": (0, "large")}
    for by, (place, expected) in ends.items():
        assert names(shown(capsys, root, sort=by)[1])[place] == expected, by
    with pytest.raises(UserError, match=r"--sort nothing: it is neither a setting of a run nor one of best, score"):
        shown(capsys, folder, sort="nothing")


def test_the_checkpoints_of_one_run(folder, capsys, tmp_path):
    out = tmp_path / "checkpoints.json"
    status, lines = shown(capsys, folder / "scored", json=str(out))
    assert status == 0 and lines[0].endswith("scored: finished, step 8 of 8, 2 checkpoints")
    assert re.search(r"^ +4 +eval/accuracy 0.9 +best .*kB +1 data rank, fp32, cpu .* not read$", lines[3])
    assert re.search(r"^ +8 +eval/accuracy 0.6 +[\d.]+ kB ", lines[4])
    listed = json.loads(out.read_text())["checkpoints"]
    assert [(one["step"], one["best"], one["verified"]) for one in listed] == [(4, True, None), (8, False, None)]
    status, lines = shown(capsys, folder / "scored", verify=True)
    assert status == 0 and lines[3].endswith("verified") and lines[4].endswith("verified")
    for wrong in ({"sort": "best"}, {"columns": ("run.seed",)}):
        with pytest.raises(UserError, match="is one: leave them out"):
            shown(capsys, folder / "scored", **wrong)
    with pytest.raises(UserError, match="--verify is about the checkpoints of one run"):
        shown(capsys, folder, verify=True)


def test_a_damaged_checkpoint_is_found(tmp_path, capsys):
    train(tmp_path / "run")
    (file,) = state_folder(tmp_path / "run", 8).glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert shown(capsys, tmp_path / "run")[0] == 0
    status, lines = shown(capsys, tmp_path / "run", verify=True)
    assert status == 1 and lines[4].endswith("damaged")
    assert any(re.search(r"step 8: .* does not have the contents that were written", line) for line in lines)


def test_a_damaged_best_checkpoint_is_not_offered(tmp_path, capsys):
    """The best of the others is, if there is one; its command works."""

    def scored(run, model):
        if run.steps_done % 4 == 0:
            run.log({"eval/accuracy": 1 / run.steps_done})

    train(tmp_path / "run", scored, best="eval/accuracy", keep=2)
    offered = f"python -m app export {tmp_path / 'run'}"
    assert shown(capsys, tmp_path / "run", verify=True)[1][-1] == f"the best one as a model: {offered} --best"
    told = []
    for step in (4, 8):
        (file,) = state_folder(tmp_path / "run", step).glob("*.distcp")
        file.write_bytes(file.read_bytes()[:-1] + b"x")
        told.append(shown(capsys, tmp_path / "run", verify=True)[1][-1])
    assert told[0] == f"the best one, of step 4, is damaged; the best of the others as a model: {offered} --step 8"
    assert told[1] == "the best one, of step 4, is damaged, and no other one has its score"


def test_the_summary_says_which_step_was_best_and_its_command_gets_it(folder, tmp_path, capsys):
    def scored(run, model):
        if run.steps_done % 4 == 0:
            run.log({"eval/accuracy": 1 / run.steps_done, "eval/loss": 1 / run.steps_done})

    train(tmp_path / "a b", scored, best="eval/accuracy", keep=1)
    said = capsys.readouterr().out
    assert f"best            eval/accuracy 0.2500 after step 4: python -m app export '{tmp_path}/a b' --best" in said
    export.main(export.Options(tmp_path / "a b", best=True, dry_run=True))
    assert "step 4 of" in capsys.readouterr().out
    train(tmp_path / "last", scored, best="-eval/loss", keep=1)
    assert "eval/loss 0.1250 after step 8, the last: it is the model above" in capsys.readouterr().out
    train(tmp_path / "none")
    assert "best" not in capsys.readouterr().out


def test_a_best_one_that_is_not_known_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"trained without --run.best.*take one with --step, of 6, 8"):
        export.main(export.Options(folder / "small", best=True, dry_run=True))
    with pytest.raises(UserError, match="--best and --step 8: give one of the two"):
        export.main(export.Options(folder / "scored", best=True, step=8, dry_run=True))
    train(tmp_path / "other", best="eval/nothing")
    with pytest.raises(UserError, match="was scored with eval/nothing; take one with --step, of 6, 8"):
        export.main(export.Options(tmp_path / "other", best=True, dry_run=True))


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("prove", {"report.json": '{"recipe": "a", "exact": true, "steps": 3}'}),
        ("torture", {"torture": ""}),
        ("lr-range", {"lr-range.json": '{"lr": [], "loss": []}'}),
        ("mine", {"report.json": "{}"}),
    ],
)
def test_runs_of_a_report_are_left_out_unless_asked_for(folder, tmp_path, capsys, name, files):
    """A folder that only has such a file by chance is the user's."""
    (tmp_path / "runs" / name).mkdir(parents=True)
    shutil.copytree(folder / "small", tmp_path / "runs" / name / "01-cpu")
    shutil.copytree(folder / "small", tmp_path / "runs" / "own")
    for file, text in files.items():
        (tmp_path / "runs" / name / file).write_text(text)
    hidden = name != "mine"
    for words, there in (([], not hidden), (["--all"], True)):
        assert app(["runs", str(tmp_path / "runs"), *words]) == 0
        out = capsys.readouterr().out
        assert ("01-cpu" in out) is there and "own" in out and ("left out: 1 run of" in out) is not there
    assert app(["runs", str(tmp_path / "runs" / name)]) == 0 and "01-cpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "said", "code"),
    [("finished", "finished", 0), ("preempted", "preempted", 75), ("failed", "failed", 1), ("running", "lost", 1)],
)
def test_the_status_of_a_run_for_programs(folder, tmp_path, capsys, status, said, code):
    run = shutil.copytree(folder / "small", tmp_path / "run")
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"status": status}))
    assert app(["runs", str(run), "--status"]) == code
    assert capsys.readouterr().out == f"{said}\n"


def test_a_run_that_goes_on_has_a_status_of_its_own(tmp_path, capsys):
    def ask(run, model):
        if run.steps_done == 1:
            capsys.readouterr()
            assert app(["runs", str(tmp_path / "run"), "--status"]) == 3
            assert capsys.readouterr().out == "running\n"

    train(tmp_path / "run", ask)


def spent(folder, **changes):
    """Write down that a run's one launch took 300 seconds on 2 devices, 200 of them for 100 steps."""
    fields = json.loads((folder / "run.json").read_text())
    parts = {"starting": 20.0, "stepping": 200.0, "evaluating": 30.0, "saving": 40.0, "ending": 10.0}
    fields["spent"][0] |= {"devices": 2, "first": 0, "last": 100, "saves": 4, **parts, **changes}
    (folder / "run.json").write_text(json.dumps(fields))


def test_where_the_time_went_and_what_it_cost(folder, tmp_path, capsys):
    run = shutil.copytree(folder / "small", tmp_path / "small")
    spent(run)
    _, lines = shown(capsys, run, price=9.0, mtbf=10.0, json=str(tmp_path / "out.json"))
    cells = {line[:19].strip(): line[19:].split() for line in lines}
    assert cells["steps that count"] == ["3:20", "66.7%", "0.111", "1.00"]
    assert cells["saving"] == ["0:40", "13.3%", "0.022", "0.20"]
    assert cells["in all"] == ["5:00", "100.0%", "0.167", "1.50"] and "steps made again" not in cells
    told = "\n".join(lines)
    assert "1 launch; 66.7% of the time made steps that count" in told and "estimated in part" not in told
    assert (
        "2 s a step, and 0.3 s of evaluations; a checkpoint stops training for 10 s (mean of 4), every 25 steps" in told
    )
    # The square root of 2 x 10 s x 36,000 s is 848.5 s, or 369 steps of 2.3 s.
    # 10 / 849 + 424 / 36,000 + 20 / 36,000 = 2.41 %
    assert "--run.save-every 369 costs least (14:09 between checkpoints)" in told
    assert "saving 1.18%, steps made again 1.18%, start-up after failures 0.06%: 2.41% more" in told
    assert "as it was:        saving 17.39%, steps made again 0.08%" in told
    time = json.loads((tmp_path / "out.json").read_text())["time"]
    assert time["save_every"] == 369 and time["cost"] == 1.5 and time["goodput"] == pytest.approx(2 / 3)
    assert time["seconds"]["total"] == 300 and time["device_hours"]["ending"] == pytest.approx(20 / 3600)
    _, lines = shown(capsys, tmp_path, price=9.0)
    (row,) = [line for line in lines if line.startswith(str(run))]
    assert re.search(r" 0\.167 +1\.50 +1 data rank", row)


def test_what_is_not_known_of_the_time_is_said(folder, tmp_path, capsys):
    run = shutil.copytree(folder / "small", tmp_path / "small")
    spent(run, saves=0, end=None)
    told = "\n".join(shown(capsys, run, mtbf=10.0)[1])
    assert "no checkpoint was made, so how often to save is not known" in told
    assert "estimated in part: 1 of them did not write its end" in told
    fields = json.loads((run / "run.json").read_text())
    del fields["spent"]
    (run / "run.json").write_text(json.dumps(fields))
    assert "where its time went is not known" in "\n".join(shown(capsys, run, price=1.0)[1])
    assert not any("time went" in line for line in shown(capsys, run)[1])


def test_prices_and_failures_that_nothing_can_have_are_refused(folder, capsys):
    for wrong in ({"price": -1.0}, {"price": float("inf")}, {"mtbf": -2.0}, {"mtbf": float("nan")}):
        with pytest.raises(UserError, match=rf"--{next(iter(wrong))} "):
            shown(capsys, folder / "small", **wrong)
    with pytest.raises(UserError, match="--mtbf is about one run"):
        shown(capsys, folder, mtbf=2.0)
