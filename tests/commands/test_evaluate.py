"""python -m app evaluate and predict: the scores of the run on any layout, on any data, and a table of predictions."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from support.box_files import coco
from support.evaluating import as_it_is
from support.launching import ROOT, scores
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassCalibrationError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, BertForSequenceClassification

from app import UserError, parse
from app.__main__ import main as app
from app.commands.evaluate import command, models
from app.commands.predict import command as predict
from app.commands.predict import tables
from app.data.corpus.documents import start_of
from app.data.tables.splits import named_sets
from app.launching.flags import parse_command
from app.tasks.detection.networks import new_detector
from app.tasks.from_scratch import DetectorScratch
from app.training.scores.classification import Calibration
from laws.many import load
from laws.small import SMALL

STEPS = 4
FLAGS = ["--run.global-batch", 8, "--run.micro-batch", 3, "--run.trackers", "--run.steps", STEPS, "--run.save-every", 2]
FLAGS += ["--run.exact", "true", "--run.eval-every", 2, "--ema.decay", 0.8, "--ema.use", "also"]
FLAGS += ["--run.best", "eval-hard/loss"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, rows):
    """Return the folder of a run of cls, with an average of its weights."""
    folder = tmp_path_factory.mktemp("evaluate") / "cls"
    recipe = load(ROOT / "recipes" / "cls.py")
    words = [*SMALL["cls"].flags(rows), *FLAGS, "--run.dir", folder, "--data.eval-sets", f"hard={rows(11)}"]
    recipe.main(parse(recipe.Config, list(map(str, words))))
    return folder


def evaluate(run, *words):
    file = run.parent / "found.json"
    file.unlink(missing_ok=True)
    assert app(["evaluate", str(run), *map(str, words), "--json", str(file)]) == 0
    return json.loads(file.read_text())


def logged(run, step, *kinds):
    """What the run itself has logged of a step, under the names of an evaluation; the first kind is named eval."""
    lines = [line for line in scores(run) if line["step"] == step and any(f"{kind}/loss" in line for kind in kinds)]
    found = {name: value for line in lines for name, value in line.items() if name != "step"}
    return {name.replace(f"{kinds[0]}/", "eval/"): value for name, value in found.items()}


@pytest.mark.launches
def test_scores_are_those_of_the_run(run):
    """To the last bit, on one process and two; of the newest weights, and of the average at an earlier step."""
    before = sorted(path.stat().st_mtime_ns for path in run.rglob("*"))
    one = as_it_is(run)
    assert one["scores"] == logged(run, STEPS, "eval", "eval-hard") and "eval-hard/accuracy" in one["scores"]
    same = yaml.safe_load((run / "config.yaml").read_text())["data"]["eval_path"]
    two = evaluate(run, same, "--profile", "fsdp_cpu:2", "--step", 2, "--weights", "ema")
    assert two["scores"] == logged(run, 2, "ema") != logged(run, 2, "eval")
    assert before == sorted(path.stat().st_mtime_ns for path in run.rglob("*"))
    names, matrix = list(one["classes"]), one["confusion"]
    assert [one["classes"][name]["samples"] for name in names] == [sum(row) for row in matrix]
    right = sum(matrix[i][i] for i in range(len(names)))
    assert right / one["scores"]["eval/samples"] == one["scores"]["eval/accuracy"]
    assert sum(one["calibration"]["samples"]) == one["scores"]["eval/samples"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "3"], "no checkpoint of step 3; there are 2, 4"),
        (["--best", "--step", "2"], "give one of the two"),
        (["--profile", "nothing"], "nothing"),
    ],
)
def test_what_cannot_be_evaluated(run, words, said):
    with pytest.raises(UserError, match=said):
        app(["evaluate", str(run), *words])


def test_a_finished_model_has_the_scores_of_its_run(run, rows, tmp_path):
    """With the run's data; with one of its sets; and elsewhere, without its run and without its training data."""
    assert as_it_is(run / "model")["scores"] == logged(run, STEPS, "eval", "eval-hard")
    hard = logged(run, STEPS, "eval-hard")
    assert as_it_is(run / "model", "--set", "hard")["scores"] == hard
    alone = shutil.copytree(run / "model", tmp_path / "alone")
    found = as_it_is(alone, rows(11), "--run.exact", "true", "--run.micro-batch", 3)
    assert found["scores"] == pytest.approx(hard, rel=1e-6) and list(found["classes"]) == ["blue", "green", "red"]


def test_on_other_data_a_run_keeps_what_it_has_learnt_from_its_own(rows, tmp_path):
    """Its tokenizer is trained on the rows that it was trained on, without those that it held out."""
    draw = np.random.default_rng(0)
    texts = [{"text": "".join(draw.choice(list("abcdefgh "), 60)), "label": str(draw.integers(2))} for _ in range(80)]
    for name, part in (("all", texts), ("new", texts[:30])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    recipe = load(ROOT / "recipes" / "cls.py")
    words = [*SMALL["cls"].flags(rows)[:-4], "--data.path", tmp_path / "all.jsonl", *FLAGS[:4], "--run.exact", "true"]
    words += ["--run.steps", 2, "--run.trackers", "--run.dir", tmp_path / "run"]
    recipe.main(parse(recipe.Config, list(map(str, words))))
    run, model = (as_it_is(place, tmp_path / "new.jsonl") for place in (tmp_path / "run", tmp_path / "run" / "model"))
    assert run["scores"] == model["scores"] and run["scores"]["eval/samples"] == 30
    part = as_it_is(tmp_path / "run", tmp_path / "new.jsonl", "--split", "train[:7]")["scores"]
    assert part["eval/samples"] == 7 and part.keys() == run["scores"].keys()


def test_a_run_over_a_mixture_is_scored_on_what_its_sources_hold_out(tmp_path, rows):
    recipe = load(ROOT / "recipes" / "cls.py")
    small = SMALL["cls"].flags(rows)
    del small[small.index("--data.path") :]
    sources = [{"name": name, "path": str(rows(count)), "weight": 1} for name, count in (("a", 101), ("b", 31))]
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump({"sources": sources}))
    words = [*small, "--data.mix", tmp_path / "mix.yaml", *FLAGS[:4], "--run.steps", 1, "--run.trackers"]
    recipe.main(parse(recipe.Config, list(map(str, [*words, "--run.dir", tmp_path / "run"]))))
    assert as_it_is(tmp_path / "run")["scores"] == logged(tmp_path / "run", 1, "eval")
    with pytest.raises(
        UserError, match=r"^--split train: .*run has trained on a mixture \(.*mix.yaml\), so name the data"
    ):
        as_it_is(tmp_path / "run", "--split", "train")
    with pytest.raises(UserError, match="would be both trained on and evaluated on"):
        as_it_is(tmp_path / "run", rows(31))


@pytest.mark.parametrize("name", ["cls", "graph"])
def test_the_split_that_is_scored_is_the_only_one_named(tmp_path, capsys, name):
    """Its scores have the plain names, and nothing is said of the split that the run was evaluated on."""
    draw = np.random.default_rng(0)
    recipe = load(ROOT / "recipes" / f"{name}.py")
    if name == "cls":
        for split, count in (("train", 40), ("valid", 8), ("test", 11)):
            lines = [{"text": "".join(draw.choice(list("ab "), 20)), "label": i % 2} for i in range(count)]
            (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        data = tmp_path
        small = SMALL[name].flags(lambda count: tmp_path / "train.jsonl")
    else:
        small, data = SMALL[name].flags(lambda count: tmp_path / "texts.jsonl"), tmp_path / "graph.npz"
        splits = {"train": np.arange(40), "valid": np.arange(40, 48), "test": np.arange(48, 59)}
        edges, x = draw.integers(0, 60, (2, 200)), draw.random((60, 3))
        np.savez(data, edges=edges, x=x, labels=np.arange(60) % 2, **splits)
    words = [*small, "--data.path", data, "--data.eval-path=", *FLAGS[:4], "--run.steps", 1, "--run.trackers"]
    recipe.main(parse(recipe.Config, list(map(str, [*words, "--run.dir", tmp_path / "run"]))))
    assert "valid" in capsys.readouterr().out
    found = as_it_is(tmp_path / "run", "--split", "test")["scores"]
    said = "".join(capsys.readouterr())
    assert found["eval/samples"] == 11 and not [score for score in found if not score.startswith("eval/")]
    assert "test" in said and "valid" not in said and "given" not in said and "--data.eval" not in said
    with pytest.raises(UserError, match=r"^--split tset: .*; there are"):  # as it was typed
        as_it_is(tmp_path / "run", "--split", "tset")


def test_a_recipe_that_does_not_hand_on_what_is_needed_is_told_so(rows, tmp_path, monkeypatch):
    """One of somebody's own: it goes on as before, but where one split alone is to be scored."""
    text = (ROOT / "recipes" / "cls.py").read_text()
    (tmp_path / "own.py").write_text(text.replace("load_data(config, run.needs)", "load_data(config)"))
    recipe = load(tmp_path / "own.py")
    words = [*SMALL["cls"].flags(rows), *FLAGS[:4], "--run.steps", 1, "--run.trackers", "--run.dir", tmp_path / "run"]
    recipe.main(parse(recipe.Config, list(map(str, words))))
    assert as_it_is(tmp_path / "run", "--trust-code")["scores"]["eval/samples"] == 7
    with pytest.raises(UserError, match="scores other sets too: have the recipe hand"):
        as_it_is(tmp_path / "run", rows(31), "--split", "train[:5]", "--trust-code")
    with pytest.raises(
        UserError, match=r"^\S*own\.py asks for data to train on, .* have it hand run.needs to what loads"
    ):
        as_it_is(tmp_path / "run" / "model", rows(31), "--recipe", tmp_path / "own.py")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("lm", []),
        ("lm", ["--mask.rate", 0.3]),
        ("tag", []),
        ("s2s", []),
        ("dpo", ["--loss.reference", "none"]),
        ("img", []),
        ("det", []),
    ],
)
def test_finished_models_of_other_recipes(rows, tmp_path, name, more):
    """Documents that share a block stay apart in an evaluation too, and masks are the same."""
    recipe = load(ROOT / "recipes" / f"{name}.py")
    words = [*SMALL[name].flags(rows), *FLAGS[:4], "--run.exact", "true", "--run.steps", 1, "--run.trackers"]
    recipe.main(parse(recipe.Config, list(map(str, [*words, *more, "--run.dir", tmp_path / "run"]))))
    quiet = ["--sample-length", 0] if name == "lm" else []
    found = as_it_is(tmp_path / "run" / "model", *quiet)
    # Convolutions may round in another way where weights lie elsewhere in memory.
    assert found["scores"] == pytest.approx(logged(tmp_path / "run", 1, "eval"), rel=1e-6)
    if "--mask.rate" in more:
        alone = shutil.copytree(tmp_path / "run" / "model", tmp_path / "alone")
        found = as_it_is(alone, rows(300), *quiet, "--data.block", 32)
        assert found["scores"].keys() == logged(tmp_path / "run", 1, "eval").keys()


def test_a_model_from_elsewhere_has_the_scores_of_a_plain_loop(run, rows, tmp_path):
    """Its classes are in another order than the data would give them, which have their numbers or other letters."""
    model = BertForSequenceClassification.from_pretrained(run / "model").eval()
    names = ["RED", "Blue", "green"]
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {n: i for i, n in enumerate(names)}
    model.config.problem_type = None
    model.save_pretrained(tmp_path / "bert")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    tokenizer.save_pretrained(tmp_path / "bert")
    data = [json.loads(line) for line in rows(23).read_text().splitlines()]
    truth = torch.tensor([[name.lower() for name in names].index(row["label"]) for row in data])
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(row["text"], return_tensors="pt")).logits for row in data])
    lines = [f"{row['text']},{number}" for row, number in zip(data, truth.tolist(), strict=True)]
    (tmp_path / "numbers.csv").write_text("\n".join(["said,is", *lines]))
    for words in ([rows(23)], [tmp_path / "numbers.csv", "--data.text", "said", "--data.label", "is"]):
        found = as_it_is(tmp_path / "bert", *words)
        assert found["scores"]["eval/accuracy"] == (logits.argmax(1) == truth).double().mean()
        assert found["scores"]["eval/loss"] == pytest.approx(cross_entropy(logits, truth).item(), rel=1e-5)
        assert list(found["classes"]) == names


def test_no_model_is_evaluated_with_new_weights_or_other_classes(run, rows, tmp_path):
    headless = shutil.copytree(run / "model", tmp_path / "headless")
    AutoModel.from_pretrained(run / "model").save_pretrained(headless)
    (headless / "config.json").write_text((run / "model" / "config.json").read_text())
    with pytest.raises(UserError, match=r"no weights that fit classifier.bias and 1 others .* --model"):
        as_it_is(headless, rows(7))
    (tmp_path / "odd.jsonl").write_text("".join(f'{{"text": "a", "label": "{n}"}}\n' for n in ("red", "pink", "grey")))
    with pytest.raises(UserError, match=r"none of the 3 classes, .* blue, green, red. Such labels: pink, grey\. .*"):
        as_it_is(headless, tmp_path / "odd.jsonl")
    recipe = load(ROOT / "recipes" / "cls.py")
    words = [*SMALL["cls"].flags(rows), "--run.dir", tmp_path / "none", "--data.eval-sets", f"x={tmp_path}/odd.jsonl"]
    with pytest.raises(UserError, match=r"row 1 .* of --data.eval-sets .*odd.jsonl has the label .pink., which no"):
        recipe.main(parse(recipe.Config, list(map(str, words))))
    with pytest.raises(UserError, match=r"--data.path is empty"):  # nothing is trained without data
        recipe.main(parse(recipe.Config, [*map(str, words), "--data.path"]))


@pytest.mark.parametrize(
    ("config", "words", "said"),
    [
        ('{"model_type": "bert", "architectures": ["BertForNextSentencePrediction"]}', ["x"], "evaluate takes"),
        ('{"model_type": "bert", "architectures": ["BertForSequenceClassification"]}', [], "give the data to evaluate"),
        ('{"model_type": "beit", "architectures": ["BeitForSemanticSegmentation"]}', ["x"], "recipes/seg.py --model"),
        ("{}", ["x", "--best"], "--best chooses a checkpoint of a run"),
        ("{}", ["x", "--weights", "ema"], "weights of one kind"),
        ("{}", ["x", "--set", "hard"], "give one of them"),
        ("", ["x"], "holds adapters and no whole model"),
    ],
)
def test_models_that_cannot_be_evaluated(tmp_path, config, words, said):
    (tmp_path / ("config.json" if config else "adapter_config.json")).write_text(config)
    with pytest.raises(UserError, match=said):
        as_it_is(tmp_path, *words)


def test_the_recipe_of_an_exported_model_is_not_its_network(tmp_path):
    """The file of a network of Samestep's own lies next to its weights."""
    new_detector(DetectorScratch(width=8), ["cat", "dog"], 3).save_pretrained(tmp_path)
    (tmp_path / "training_config.yaml").write_text("model: ''\ndata: {path: [builtin:scenes], eval_path: ''}\n")
    (tmp_path / "det.py").touch()
    assert sorted(file.name for file in tmp_path.glob("*.py")) == ["dense.py", "det.py"]
    assert models.of_model(command.Options(run=tmp_path), []).recipe == tmp_path / "det.py"
    (tmp_path / "mine.py").touch()
    with pytest.raises(UserError, match="2 files that may be its recipe"):
        models.of_model(command.Options(run=tmp_path), [])


@pytest.mark.parametrize("given", ["hard", "=x", "a=", "a=x a=y", "train=x"])
def test_sets_need_names_and_paths(given):
    with pytest.raises(UserError, match=r"NAME=PATH|names two sets a|training set's name"):
        named_sets(given.split())


def test_flags_of_the_recipe_leave_the_commands_own_arguments_alone(capsys):
    options, flags = parse_command(command.Options, ["runs/x", "--best", "--data.text", "a", "b"], "", True)
    assert (options.data, options.best, flags) == ("", True, ["--data.text", "a", "b"])
    with pytest.raises(SystemExit):
        parse_command(command.Options, ["--help"], "", True)
    assert "[OPTIONS] RUN [DATA]" in capsys.readouterr().out


def test_calibration_is_torchmetrics():
    """And does not depend on how samples are spread."""
    random = torch.Generator().manual_seed(0)
    logits, target = torch.randn(203, 5, generator=random) * 2, torch.randint(5, (203,), generator=random)
    expected = MulticlassCalibrationError(5, n_bins=15, norm="l1")(logits, target).item()
    whole, parts = Calibration(), [Calibration() for _ in range(3)]
    whole.update(logits, target)
    for part, a, b in zip(parts, logits.split(70), target.split(70), strict=True):
        part.update(a, b)
    whole.alone()
    assert whole.report()["calibration"]["error"] == pytest.approx(expected, rel=1e-5)
    parts[0].state = parts[2].state + parts[0].state + parts[1].state
    parts[0].alone()
    assert parts[0].report() == whole.report()


@pytest.mark.parametrize("end", ["parquet", "jsonl"])
def test_predictions_are_in_the_order_of_the_data(run, rows, tmp_path, end, monkeypatch):
    monkeypatch.setattr(tables, "AT_ONCE", 7)
    file = tmp_path / "out" / f"predictions.{end}"
    assert app(["predict", str(run), str(rows(23)), "--to", str(file), "--keep", "label", "--batch", "5"]) == 0
    lines = [json.loads(line) for line in file.read_text().splitlines()] if end == "jsonl" else []
    lines = lines or pq.read_table(file).to_pylist()
    data = [json.loads(line) for line in rows(23).read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(23))
    assert [line["label"] for line in lines] == [row["label"] for row in data]
    for line in lines:
        chances = {name.removeprefix("p/"): value for name, value in line.items() if name.startswith("p/")}
        assert sum(chances.values()) == pytest.approx(1) and line["probability"] == chances[line["prediction"]]
        assert max(chances, key=chances.get) == line["prediction"]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_accuracy_of_kept_labels_is_said(run, rows, tmp_path, capsys):
    assert app(["predict", str(run), str(rows(23)), "--to", str(tmp_path / "a.jsonl"), "--keep", "label"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    share = sum(line["label"] == line["prediction"] for line in lines) / 23
    assert f"a.jsonl: 23 rows, accuracy {share:.4f} (by label)" in capsys.readouterr().out


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_predictions_of_several_labels_and_of_amounts(run, rows, tmp_path, problem):
    """They are the model's own numbers: sigmoids of each label, or amounts as they are."""
    amounts = problem == "regression"
    kind = AutoConfig.from_pretrained(run / "model", num_labels=1 if amounts else 3, problem_type=problem)
    torch.manual_seed(0)
    model = BertForSequenceClassification(kind).eval()
    torch.nn.init.normal_(model.classifier.weight, std=1.0)
    model.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert app(["predict", str(tmp_path / "model"), str(rows(7)), "--to", str(tmp_path / "a.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    texts = [json.loads(line)["text"] for line in rows(7).read_text().splitlines()]
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    if amounts:
        assert [line["prediction"] for line in lines] == pytest.approx(logits[:, 0].tolist(), rel=1e-4)
        return
    names = [model.config.id2label[i] for i in range(3)]
    for line, shares in zip(lines, logits.sigmoid().tolist(), strict=True):
        assert [line[f"p/{name}"] for name in names] == pytest.approx(shares, rel=1e-4)
        assert set(line["prediction"]) == {name for name, share in zip(names, shares, strict=True) if share >= 0.5}
    assert {len(line["prediction"]) for line in lines} - {0, 3}  # some labels of a row, and not others


def test_a_table_that_is_not_whole_has_no_name(tmp_path):
    with pytest.raises(ZeroDivisionError), tables.Writer(tmp_path / "a.parquet") as writer:
        writer.add({"row": 0})
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "x.csv"], "ends in .parquet or .jsonl"),
        (["--to", __file__.replace(".py", ".parquet"), "--keep", "none"], "have no such column; they have text, label"),
        (["--text", "none"], "have no such column; they have text, label"),
        (["--batch", "0"], "--batch 0: must be 1 or more"),
    ],
)
def test_what_cannot_be_predicted(run, rows, words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        app(["predict", str(run), str(rows(7)), *words])


def test_models_of_other_tasks(tmp_path):
    with pytest.raises(UserError, match="is no model that transformers can read"):
        predict._task(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"build `network` as the recipe does, then .*load_model\(network, "):
        predict._task(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}')
    with pytest.raises(UserError, match="BertForMaskedLM: predict takes classifiers"):
        predict._task(str(tmp_path))


@pytest.fixture(scope="module")
def writer(tmp_path_factory, rows):
    """Return the folder of a run of dpo, which trains a language model."""
    folder = tmp_path_factory.mktemp("writer") / "dpo"
    recipe = load(ROOT / "recipes" / "dpo.py")
    words = [*SMALL["dpo"].flags(rows), *FLAGS[:4], "--run.steps", 1, "--run.trackers", "--run.dir", folder]
    recipe.main(parse(recipe.Config, list(map(str, words))))
    return folder


def test_a_language_model_goes_on_with_prompts(writer, tmp_path):
    """As transformers' own generate does for each by itself; and after a conversation, by the chat template."""
    prompts = ["def name(", "x", "a longer one, with more tokens"]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in prompts))
    words = [str(tmp_path / "a.jsonl"), "--tokens", "5", "--to"]
    assert app(["predict", str(writer), *words, str(tmp_path / "b.jsonl")]) == 0
    model, tokenizer = (kind.from_pretrained(writer / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    start = torch.tensor([[start_of(tokenizer)]])
    for text, line in zip(prompts, (tmp_path / "b.jsonl").read_text().splitlines(), strict=True):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        found = model.generate(torch.cat([start, ids], 1), max_new_tokens=5)[0, ids.shape[1] + 1 :]
        assert json.loads(line)["prediction"] == tokenizer.decode(found, skip_special_tokens=True)
    chats = {"messages": [{"role": "user", "content": "x"}]}
    (tmp_path / "a.jsonl").write_text(2 * f"{json.dumps(chats)}\n")
    with pytest.raises(UserError, match="no chat template"):
        app(["predict", str(writer), *words, str(tmp_path / "c.jsonl")])
    copy = shutil.copytree(writer / "model", tmp_path / "chats")
    tokenizer.chat_template = "{{ messages[0]['content'] }}:{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
    tokenizer.save_pretrained(copy)
    assert app(["predict", str(copy), *words, str(tmp_path / "c.jsonl")]) == 0
    ids = tokenizer(f"x:{tokenizer.eos_token}", add_special_tokens=False, return_tensors="pt")["input_ids"]
    found = tokenizer.decode(model.generate(ids, max_new_tokens=5)[0, ids.shape[1] :], skip_special_tokens=True)
    lines = [json.loads(line)["prediction"] for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert lines == [found, found]
    # Messages are read as in training.
    (tmp_path / "a.jsonl").write_text(2 * f"{json.dumps({'messages': [{'from': 'human', 'value': 'x'}]})}\n")
    assert app(["predict", str(copy), *words, str(tmp_path / "d.jsonl")]) == 0
    assert (tmp_path / "d.jsonl").read_text() == (tmp_path / "c.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(2 * f"{json.dumps({'messages': [{'role': 'narrator', 'content': 'x'}]})}\n")
    with pytest.raises(UserError, match=r"--text messages: message 0 of row 0 .* has the role 'narrator'"):
        app(["predict", str(copy), *words, str(tmp_path / "e.jsonl")])


@pytest.fixture(scope="module")
def detector(tmp_path_factory, rows):
    """Return the folder of a run of det, on files of COCO."""
    folder = tmp_path_factory.mktemp("detector")
    recipe, path = load(ROOT / "recipes" / "det.py"), coco(folder / "data")
    words = [*SMALL["det"].flags(rows)[:4], "--data.path", path, "--data.eval-path=", "--data.holdout", 0.5]
    words += [*FLAGS[:4], "--run.steps", 1, "--run.trackers", "--run.dir", folder / "run"]
    recipe.main(parse(recipe.Config, list(map(str, words))))
    return folder


def test_boxes_are_those_that_a_run_is_scored_by(detector, tmp_path):
    """By pycocotools, from COCO's results format with the numbers of an annotation file."""
    path = detector / "data" / "boxes.json"
    words = ["predict", str(detector / "run"), str(path), "--threshold", "0", "--to"]
    assert app([*words, str(tmp_path / "a.json"), "--annotations", str(path), "--overlay"]) == 0
    found = as_it_is(detector / "run" / "model", path)["scores"]
    whole = json.loads(path.read_text())
    for number, box in enumerate(whole["annotations"], 1):
        box |= {"id": number, "area": box["bbox"][2] * box["bbox"][3]}
    (tmp_path / "truth.json").write_text(json.dumps(whole))
    with contextlib.redirect_stdout(None):
        truth = COCO(str(tmp_path / "truth.json"))
        judge = COCOeval(truth, truth.loadRes(str(tmp_path / "a.json")), "bbox")
        for step in (judge.evaluate, judge.accumulate, judge.summarize):
            step()
    assert (judge.stats[0], judge.stats[1]) == pytest.approx((found["eval/map"], found["eval/map50"]), abs=1e-6)
    assert len(list((tmp_path / "overlays").glob("*.png"))) == 6
    assert app([*words, str(tmp_path / "a.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    results = json.loads((tmp_path / "a.json").read_text())
    assert [line["probability"] for line in lines] == [result["score"] for result in results]
    assert [[line["left"], line["top"]] for line in lines] == [result["bbox"][:2] for result in results]
    assert {Path(line["file"]).name for line in lines} <= {f"{index}.png" for index in range(6)}
    words[2] = str(path.parent / "images")  # the pictures alone
    assert app([*words, str(tmp_path / "b.jsonl")]) == 0
    plain = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [(line["row"], line["probability"]) for line in plain] == [
        (line["row"], line["probability"]) for line in lines
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--annotations", "x.json"], "is for COCO's results: give --to NAME.json"),
        (["--to", "b.json", "--annotations", "none.json"], "--annotations none.json: cannot be read"),
        (["--threshold", "2"], "--threshold 2: must be from 0 to 1"),
        (["--keep", "left"], "--keep left: the data have no such column"),
        (["--probabilities"], "--probabilities is for segmentation"),
    ],
)
def test_what_a_detector_does_not_take(detector, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        app(["predict", str(detector / "run"), str(detector / "data" / "boxes.json"), *words])
