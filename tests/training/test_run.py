"""app.run, in one process: what is saved when, and which runs are refused."""

import importlib.util
import json
import math
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
import yaml
from support import tiny
from support.tiny import DATA, Config, train_and_score
from torch import nn

from app import OptimConfig, Run, RunConfig, UserError
from app.distributed import collectives
from app.rundir import recipe_source


def saved(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def test_an_evaluation_that_improves_is_saved_with_its_own_step(tmp_path):
    """The best checkpoint has the weights that were scored, whatever --run.save-every is."""
    curve = {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.7}
    train_and_score(
        tmp_path,
        scores=lambda step: {"eval/x": curve[step]},
        eval_every=2,
        save_every=3,
        keep=1,
        best="eval/x",
    )
    assert saved(tmp_path) == [4, 8]
    record = json.loads((tmp_path / "checkpoints" / "step-00000004" / "record.json").read_text())
    assert record["metrics"] == {"eval/x": 0.9}


@pytest.mark.parametrize("asked, kept", [("auto", "eval/x"), ("-eval/x", "-eval/x"), ("", "")])
def test_the_recipe_chooses_the_best_metric_if_nobody_else_does(tmp_path, asked, kept):
    settings = {"global_batch": 10, "micro_batch": 5, "trackers": (), "best": asked, "steps": 1, "dir": str(tmp_path)}
    config = Config(RunConfig(**settings))
    with Run(config) as run:
        run.keep_best("eval/x")
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            assert run.services.checkpoint_store.retention.best == run.config.best == kept
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["run"]["best"] == kept
    assert config.run.best == asked  # the caller's own


@pytest.mark.parametrize("best, warned", [("eval/loss", True), ("-eval/loss", False), ("eval/x", False), ("", False)])
def test_a_loss_of_which_the_highest_would_be_the_best_is_warned_of(tmp_path, capsys, best, warned):
    train_and_score(tmp_path, best=best, steps=1, scores=lambda step: {"eval/loss": 1.0, "eval/x": 1.0})
    assert ("--run.best=-eval/loss" in "".join(capsys.readouterr())) == warned


def test_the_best_is_remembered_over_launches(tmp_path):
    curve = {2: 0.9, 4: 0.5, 6: 0.6, 8: 0.7}
    for stop in (4, 0):
        flags = {"eval_every": 2, "save_every": 4, "keep": 1, "best": "eval/x", "stop_at": stop}
        train_and_score(tmp_path, scores=lambda step: {"eval/x": curve[step]}, **flags)
    assert saved(tmp_path) == [2, 8]


def test_a_best_that_no_evaluation_gives_is_said_once(tmp_path, capsys):
    train_and_score(tmp_path, best="eval/acuracy")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "--run.best" in line]
    assert "eval/acuracy" in line and "there are eval/x" in line


def test_scores_beside_those_of_an_evaluation_say_nothing_of_the_best(tmp_path, capsys):
    curve = {4: {"eval/late": 1.0}, 8: {"eval/late": 2.0}}
    train_and_score(tmp_path, best="eval/late", eval_every=2, scores=lambda step: curve.get(step, {"x": 1.0}))
    assert "--run.best" in capsys.readouterr().err  # a control: an evaluation without it
    with open_run(tmp_path / "other", best="eval/late", eval_every=4, save_every=1) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            go(run, model, optimizer, batch)
            run.log({"x": 1.0} | ({"eval/late": 1.0} if run.due(4) else {}))
    assert "--run.best" not in capsys.readouterr().err


@pytest.mark.parametrize("longer", [{"epochs": 3.0}, {"steps": 11}])
def test_a_run_that_is_made_longer_misses_no_sample(tmp_path, longer):
    """Its last step was short: 40 rows in steps of 12. What follows begins where that one ended."""
    drawn = []

    def collate(rows):
        drawn.extend(rows)
        return torch.stack([DATA[row] for row in rows])

    common = {"global_batch": 12, "micro_batch": 6, "log_every": 1}
    for fields in ({"epochs": 1.0}, {"epochs": 2.0}, longer):
        tiny.train(tmp_path, rows=list(range(40)), collate=collate, **common, **fields)
    assert [sorted(drawn[start : start + 40]) for start in (0, 40)] == [list(range(40))] * 2
    assert len(set(drawn[80:])) == len(drawn[80:]) == (40 if "epochs" in longer else 36)
    made = [line["samples"] for line in lines(tmp_path) if "samples" in line]
    assert made == [12, 24, 36, 40, 52, 64, 76, 80, 92, 104, 116, *([120] if "epochs" in longer else [])]


def test_fewer_steps_than_were_made_are_refused(tmp_path):
    """Nothing changes in the folder."""
    train_and_score(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.*") if path.is_file()}
    with pytest.raises(UserError, match=r"has made 8 steps, and only 4 are asked for.*--run\.epochs"):
        train_and_score(tmp_path, epochs=1.0)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("rows", "lengths", "words"),
    [
        (DATA[:-1], np.arange(39), "40 rows, and now there are 39"),
        (DATA, np.arange(40)[::-1], "had 40 rows, and their lengths or weights were others"),
    ],
)
def test_other_data_is_refused(tmp_path, rows, lengths, words):
    """Laws 1 and 4 would be broken without a word: every step's samples depend on the number of rows and lengths."""
    train_and_score(tmp_path, lengths=np.arange(40), stop_at=3)
    with pytest.raises(UserError, match=words):
        train_and_score(tmp_path, rows=rows, lengths=lengths)
    train_and_score(tmp_path, lengths=np.arange(40))


@pytest.mark.parametrize(("flags", "words"), [({"epochs": 2.0}, "--run.epochs"), ({"steps": 8}, "--run.steps")])
def test_advice_names_the_flag_that_decides(tmp_path, capsys, flags, words):
    train_and_score(tmp_path, stop_at=3, **flags)
    assert "the same command without --run.stop-at goes on after step 3" in capsys.readouterr().out
    train_and_score(tmp_path, **flags)
    assert f"a larger {words}" in capsys.readouterr().out


class Modes(nn.Module):
    """A model that is given in evaluation mode, as from_pretrained gives it, and a part that is to stay in it."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.teacher = nn.Linear(4, 1), nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        return self.linear(self.teacher(self.dropout(x)))


def open_run(folder, **settings):
    settings = {"global_batch": 10, "micro_batch": 5, "trackers": (), "epochs": 1.0, "log_every": 1, **settings}
    return Run(Config(RunConfig(dir=str(folder), **settings)))


def go(run, model, optimizer, batch, name="loss"):
    """Take one step."""
    for micro in batch.micros(model):
        run.backward(model(micro.inputs).square().mean(), micro, name)
    run.step(optimizer)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_model_trains_in_training_mode_before_and_after_evaluations(tmp_path):
    """Dropout would be off for pretrained models until the first evaluation, and on for frozen parts after it."""
    with open_run(tmp_path) as run:
        model, optimizer = run.prepare(Modes().eval(), OptimConfig())
        model.teacher.eval()
        seen = []
        for batch in run.batches(DATA, torch.stack):
            seen.append((model.training, model.dropout.training, model.teacher.training))
            go(run, model, optimizer, batch)
            for micro in run.evaluation(model, DATA, torch.stack):
                assert not any(module.training for module in model.modules()) and len(micro.inputs)
    assert seen == [(True, True, False)] * 4


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """They may become so in a step that is not measured, and leave the losses of later ones finite."""
    with pytest.raises(UserError, match="weights after step 4 are not finite"):
        with open_run(tmp_path, log_every=100, epochs=2.0) as run:
            model, optimizer = run.prepare(nn.Linear(4, 2), OptimConfig(clip=0.0))
            for batch in run.batches(DATA, torch.stack):
                for micro in batch.micros(model):
                    run.backward(model(micro.inputs)[:, 0].square().mean(), micro)
                run.step(optimizer)
                if run.steps_done == 2:
                    with torch.no_grad():
                        model.weight[1] = torch.inf
    assert not (tmp_path / "checkpoints").exists()
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "failed"


def test_what_failed_first_is_noted(tmp_path):
    """A rank that hangs is ended, and its end is what the others may see before theirs."""
    with pytest.raises(RuntimeError), Run(Config(RunConfig(dir=str(tmp_path), trackers=()))) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
            run.logger.failed("no progress")
            run.logger.failed("another process has died")
            raise RuntimeError("what follows")
    assert json.loads((tmp_path / "run.json").read_text())["error"] == "no progress"


def test_the_first_of_several_ranks_to_fail_is_known_to_the_others(monkeypatch):
    """In each run that a process has; an error that both have is each one's own."""
    shared, used = torch.distributed.HashStore(), {1: Counter(), 0: Counter()}
    monkeypatch.setattr(collectives, "store", lambda: shared)
    monkeypatch.setattr(collectives, "alone", lambda: False)

    def ended(rank, error):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(collectives._process, "uses", used[rank])
        return collectives.failed_before(error)

    lost = RuntimeError("Connection closed by peer")
    assert [ended(1, OSError("disk gone")), ended(0, lost)] == ["", "rank 1: OSError: disk gone"]
    assert [ended(1, None), ended(0, lost)] == ["", ""]
    assert [ended(1, UserError("wrong: x")), ended(0, UserError("wrong: x"))] == ["", ""]


def test_losses_may_have_any_name(tmp_path, capsys):
    with open_run(tmp_path) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            go(run, model, optimizer, batch, "generator")
    assert lines(tmp_path)[0]["generator"] > 0 and "generator 0." in capsys.readouterr().out


def test_evaluating_before_training_and_after(tmp_path):
    """The score of the untrained model, and one behind the loop, which belongs to the last step."""
    with open_run(tmp_path) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        assert len(list(run.evaluation(model, DATA, torch.stack))) == 8
        for batch in run.batches(DATA, torch.stack):
            go(run, model, optimizer, batch)
        run.log({"test/score": torch.tensor(0.5), "test/other": np.float32(0.25)})
        run.finish(model)
    assert lines(tmp_path)[-1] == {"step": 4, "test/score": 0.5, "test/other": 0.25}


def test_a_score_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"eval/x is a list"):
        train_and_score(tmp_path, scores=lambda step: {"eval/x": [1, 2]})


@pytest.mark.parametrize(("before", "steps"), [(True, 1), (False, 2)])
def test_a_loop_that_is_left_early_counts_what_was_done(tmp_path, before, steps):
    """By `break`, before the step's update or after it; the same command goes on from there."""
    with open_run(tmp_path, save_every=1) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            if before and run.steps_done == 2:
                break
            go(run, model, optimizer, batch)
            if run.steps_done == 2:
                break
        run.finish(model)
    assert run.steps_done == steps == saved(tmp_path)[-1] == lines(tmp_path)[-1]["step"]
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "preempted"
    assert not (tmp_path / "model").exists()


def test_a_forgotten_update_is_refused(tmp_path):
    with pytest.raises(UserError, match="step 1 ended without"), Run(Config(RunConfig(dir=str(tmp_path)))) as run:
        model, _ = run.prepare(nn.Linear(4, 1), OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)


def test_a_second_backward_pass_in_a_turn_is_refused(tmp_path):
    """Under DDP it would miss the synchronisation; parts that are handed over at once are logged each, and summed."""
    with Run(Config(RunConfig(dir=str(tmp_path / "run"), steps=1, global_batch=10, micro_batch=5, trackers=()))) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig(clip=0.0))
        expected = []
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                output = model(micro.inputs)
                parts = {"loss/size": output.mean(), "loss/square": output.square().mean()}
                expected.append(torch.autograd.grad(sum(parts.values()) / 2, model.weight, retain_graph=True)[0])
                run.backward(parts, micro)
                with pytest.raises(UserError, match=r"a second run\.backward in one turn"):
                    run.backward(output.mean(), micro)
            assert torch.allclose(model.weight.grad, sum(expected))
            run.step(optimizer)
    assert {"loss/size", "loss/square"} < set(json.loads((tmp_path / "run" / "metrics.jsonl").read_text()))


def test_saving_before_the_update_is_refused(tmp_path):
    """It would be a checkpoint of this step with the weights of the one before."""
    with pytest.raises(UserError, match=r"run\.save in step 1 before run\.step"), open_run(tmp_path) as run:
        run.prepare(nn.Linear(4, 1), OptimConfig())
        for _ in run.batches(DATA, torch.stack):
            run.save()


def test_a_micro_batch_without_weight_adds_nothing(tmp_path):
    """Though its weighted mean is 0 / 0."""
    rows = [(row, float(number > 19)) for number, row in enumerate(DATA)]
    with open_run(tmp_path, micro_batch=1, steps=4, log_every=1) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        weights = np.array([weight for _, weight in rows])
        for batch in run.batches(rows, lambda rows: [torch.stack([r for r, _ in rows]), rows[0][1]], weights=weights):
            for micro in batch.micros(model):
                inputs, weight = micro.inputs
                run.backward(model(inputs).square().mean() * weight / torch.tensor(weight), micro)
            run.step(optimizer)
        run.finish(model)
    assert all(math.isfinite(line["loss"]) for line in lines(tmp_path))


def test_a_second_loop_over_all_batches_is_refused(tmp_path):
    with pytest.raises(UserError, match="was called before"):
        with open_run(tmp_path) as run:
            model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
            for batch in run.batches(DATA, torch.stack):
                go(run, model, optimizer, batch)
            next(run.batches(DATA, torch.stack))


def test_columns_belong_to_optimizers_in_the_order_of_prepare(tmp_path):
    """Whatever the order, and the number of times, in which a step uses them."""
    with open_run(tmp_path) as run:
        first, one = run.prepare(nn.Linear(4, 1), OptimConfig(lr=0.1, schedule="constant"))
        second, two = run.prepare(nn.Linear(4, 1), OptimConfig(lr=0.2, schedule="constant"))
        for batch in run.batches(DATA, torch.stack):
            for model, optimizer, name in ((second, two, "b"), (first, one, "a"), (first, one, "a")):
                for micro in batch.micros(model):
                    run.backward((1e-3 if name == "a" else 1.0) * model(micro.inputs).square().mean(), micro, name)
                run.step(optimizer)
    line = lines(tmp_path)[0]
    assert (line["lr"], line["lr/1"]) == (0.1, 0.2) and line["grad_norm"] < 0.05 < line["grad_norm/1"]
    assert not any(key.endswith("/2") for key in line)


def test_an_optimizer_that_was_not_prepared_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"run\.prepare did not return"):
        with open_run(tmp_path) as run:
            model, _ = run.prepare(nn.Linear(4, 1), OptimConfig())
            for _ in run.batches(DATA, torch.stack):
                run.step(torch.optim.SGD(model.parameters()))


def test_randomness_of_collate_belongs_to_the_micro_batch(tmp_path):
    """As collators for masked language models have it; the number of workers changes nothing."""

    def noisy(rows):
        return torch.stack(rows) * torch.bernoulli(torch.full((4,), 0.5))

    losses = []
    for workers in (0, 2):
        torch.manual_seed(workers)
        with open_run(tmp_path / str(workers), workers=workers) as run:
            model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
            for batch in run.batches(DATA, noisy):
                go(run, model, optimizer, batch)
        losses.append([line["loss"] for line in lines(tmp_path / str(workers))])
    assert losses[0] == losses[1]


def test_a_full_disk_costs_a_warning(tmp_path, capsys, monkeypatch):
    """Records are written again when there is room; the folder is given back in any case."""
    from app.rundir.folder import RunFolder

    full = OSError(28, "No space left on device")
    write = RunFolder._write

    def refuse(self, name, text):
        raise full

    with open_run(tmp_path, save_every=1) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            monkeypatch.setattr(RunFolder, "_write", refuse if run.steps_done < 3 else write)
            go(run, model, optimizer, batch)
    assert "run.json could not be brought up to date: No space left" in capsys.readouterr().err
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "finished"
    monkeypatch.setattr(RunFolder, "_write", refuse)
    with pytest.raises(UserError, match="No space left"):
        train_and_score(tmp_path)
    monkeypatch.setattr(RunFolder, "_write", write)
    train_and_score(tmp_path, epochs=1.0)  # and not refused as in use


def test_pictures_belong_to_their_step(tmp_path):
    """In the folder and in tensorboard; those of one name in one row."""
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    grey, colour = np.arange(12, dtype=np.uint8).reshape(3, 4), np.full((3, 4, 3), 7, np.uint8)
    with Run(Config(RunConfig(dir=str(tmp_path), trackers=("tensorboard",), steps=2, global_batch=8))) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.log_images({"eval/pair": [grey, colour], "one": [grey + run.steps_done]})
            run.step(optimizer)
    found = sorted(str(path.relative_to(tmp_path / "images")) for path in (tmp_path / "images").rglob("*.png"))
    assert found == [
        *(f"eval/pair/step-0000000{step}-{index}.png" for step in (1, 2) for index in (0, 1)),
        *(f"one/step-0000000{step}.png" for step in (1, 2)),
    ]
    picture = np.asarray(Image.open(tmp_path / "images" / "one" / "step-00000002.png"))
    assert (picture == (grey + 2)[..., None]).all() and picture.shape == (3, 4, 3)
    (file,) = (tmp_path / "tensorboard").glob("events*")
    events = EventAccumulator(str(file)).Reload()
    assert events.Tags()["images"] == ["eval/pair", "one"]
    assert [event.step for event in events.Images("one")] == [1, 2]


@pytest.mark.parametrize(
    ("pictures", "words"),
    [
        ([np.zeros((3, 4))], "float64 and shape"),
        ([np.zeros((3, 4, 2), np.uint8)], "shape"),
        ([np.zeros((3, 4), np.uint8), np.zeros((4, 4), np.uint8)], "2 sizes"),
        ([], "0 sizes"),
    ],
)
def test_what_is_no_picture_is_refused(tmp_path, pictures, words):
    with pytest.raises(UserError, match=words), Run(Config(RunConfig(dir=str(tmp_path)))) as run:
        run.log_images({"x": pictures})


@pytest.mark.parametrize(("losses", "falls"), [((2.0, 1.5, 1.9), True), ((2.0, 2.5, 1.9999), False), ((2.0,), True)])
def test_a_loss_that_does_not_fall_is_said(tmp_path, capsys, losses, falls):
    """In a run that was stopped and resumed too, whose first evaluation was before the stop."""

    def scores(step):
        return {"eval/loss": losses[step // 2 - 1]} if step // 2 <= len(losses) else {}

    train_and_score(tmp_path / "run", scores=scores, eval_every=2, stop_at=3)
    train_and_score(tmp_path / "run", scores=scores, eval_every=2)
    told = f"warning: eval/loss did not fall: 2.0000 in the first evaluation, {losses[-1]:.4f} now"
    assert (told in capsys.readouterr().err) is not falls


def test_a_quiet_run_prints_warnings_alone(tmp_path, capsys):
    train_and_score(tmp_path / "loud")
    assert "finished: 8 steps" in capsys.readouterr().out
    train_and_score(tmp_path / "quiet", quiet=True, best="eval/no")
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("warning: --run.best eval/no")


def test_a_recipes_commit_is_noted(tmp_path):
    """With a + where files have changed since; and nothing without git."""

    def git(*words):
        settings = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        words = ["git", "-C", str(tmp_path / "project"), *settings, *words]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "project").mkdir()
    file = tmp_path / "project" / "mine.py"
    file.write_text("class Config: ...\n")
    spec = importlib.util.spec_from_file_location("mine", file)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    sys.modules["mine"] = module
    assert recipe_source.origin_of(module.Config())[1] == ""
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert recipe_source.origin_of(module.Config())[1] == git("rev-parse", "HEAD")
    file.write_text("class Config: pass\n")
    assert recipe_source.origin_of(module.Config())[1] == git("rev-parse", "HEAD") + "+"


def test_a_run_from_before_a_setting_existed_goes_on_where_it_has_the_default(tmp_path):
    """What that is, the recipe says; any other value would not be what the run was begun with."""
    train_and_score(tmp_path / "run", stop_at=3)
    file = tmp_path / "run" / "config.yaml"
    settings = yaml.safe_load(file.read_text())
    del settings["run"]["exact"], settings["run"]["sync_bn"]
    file.write_text(yaml.safe_dump(settings))
    with pytest.raises(UserError, match=r"run\.exact: False before, True now") as refusal:
        train_and_score(tmp_path / "run", exact=True)
    assert "sync_bn" not in str(refusal.value)
    train_and_score(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_what_belongs_into_the_loop_is_refused_outside_it(tmp_path):
    """By name, and with what to do; after the loop the last step still counts."""
    with Run(
        Config(run=RunConfig(dir=str(tmp_path / "run"), steps=2, global_batch=4, micro_batch=2, quiet=True))
    ) as run:
        model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
        for call in (lambda: run.due(1), run.save):
            with pytest.raises(UserError, match=r"run\.(due|save) before run.batches: call it in the body"):
                call()
        with pytest.raises(UserError, match=r"run.step outside a step: call it in the body"):
            run.step(optimizer)
        for batch in run.batches(DATA, torch.stack):
            for micro in batch.micros(model):
                run.backward(model(micro.inputs).square().mean(), micro)
            run.step(optimizer)
        assert run.due(2) and run.steps_done == 2
        run.save()
        with pytest.raises(UserError, match=r"run.backward outside a step"):
            run.backward(torch.zeros((), requires_grad=True), micro)
        run.finish(model)


def test_scores_from_before_the_loop_count(tmp_path):
    """Of a model that is not trained yet; and those of an evaluation that comes when no step is left to make."""
    settings = RunConfig(
        dir=str(tmp_path / "run"), steps=2, global_batch=4, micro_batch=2, quiet=True, best="eval/late"
    )
    for values in ({"eval/before": 0.5}, {"eval/late": 2.5}):
        with Run(Config(run=settings)) as run:
            model, optimizer = run.prepare(nn.Linear(4, 1), OptimConfig())
            if "eval/before" in values:
                run.log(values)
            for batch in run.batches(DATA, torch.stack):
                for micro in batch.micros(model):
                    run.backward(model(micro.inputs).square().mean(), micro)
                run.step(optimizer)
            if "eval/late" in values:
                run.log(values)
                run.save()
            assert run.finish(model) == {"eval/before": 0.5, **values}
    last = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert json.loads((last / "scores.json").read_text())["metrics"] == {"eval/late": 2.5}


def test_a_model_takes_the_place_of_one_that_cannot_be_deleted(tmp_path, monkeypatch):
    """A network disk keeps a file that somebody reads; a failed rename must not cost both models."""
    first = (
        tiny.train(tmp_path / "run", epochs=1.0) is not None and (tmp_path / "run/model/model.safetensors").read_bytes()
    )
    monkeypatch.setattr("shutil.rmtree", lambda *arguments, **known: None)
    tiny.train(tmp_path / "run")
    assert (tmp_path / "run/model/model.safetensors").read_bytes() != first
