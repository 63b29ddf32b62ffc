"""app.config: flags, a file of flags before them, one validator for both, and errors that name the fix."""

import ast
import inspect
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from app.config import (
    OnResume,
    OptimConfig,
    RunConfig,
    check,
    chosen,
    defaults,
    diff,
    flatten,
    on_resume,
    setting,
    to_dict,
)
from app.errors import UserError
from app.launching.flags import _expand_file, parse
from laws.many import load

ROOT = Path(__file__).parents[2]


@dataclass
class Config:
    """What a recipe reads."""

    model: str = ""
    quick: bool = False
    sizes: tuple[int, ...] = (1, 2)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(epochs=6))


def write(path: Path, fields) -> str:
    path.write_text(fields if isinstance(fields, str) else yaml.safe_dump(fields, sort_keys=False))
    return str(path)


def test_nothing_given_gives_the_recipes_defaults():
    assert parse(Config, []) == Config()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--run.steps 7", "steps", 7),
        ("--run.epochs 2", "epochs", 2.0),
        ("--run.global-batch 8", "global_batch", 8),
        ("--run.workers -1", "workers", -1),
        ("--run.resume must", "resume", "must"),
        ("--run.trackers", "trackers", ()),
        ("--run.trackers wandb tensorboard", "trackers", ("wandb", "tensorboard")),
        ("--run.best eval/accuracy", "best", "eval/accuracy"),
        ("--run.best=-eval/loss", "best", "-eval/loss"),
    ],
)
def test_flags(words, name, value):
    found = getattr(parse(Config, words.split()).run, name)
    assert found == value and type(found) is type(value)


def test_tuples_and_truth_take_values():
    words = "--sizes 5 6 7 --quick True --optim.betas 0.5 0.6 --optim.milestones 0.5 90"
    config = parse(Config, words.split())
    assert (config.sizes, config.quick) == ((5, 6, 7), True)
    assert (config.optim.betas, config.optim.milestones) == ((0.5, 0.6), (0.5, 90.0))


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
@pytest.mark.parametrize("before", [True, False])
def test_flags_win_over_the_file_wherever_they_stand(tmp_path, form, before):
    file = write(tmp_path / "c.yaml", {"run": {"steps": 3, "trackers": []}, "optim": {"lr": 0.5}, "model": "m"})
    words, flags = [word.format(file) for word in form], ["--run.steps", "9"]
    config = parse(Config, [*flags, *words] if before else [*words, *flags])
    assert config == Config(model="m", optim=OptimConfig(lr=0.5), run=RunConfig(epochs=6, steps=9, trackers=()))


def test_an_empty_file_changes_nothing(tmp_path):
    assert parse(Config, ["--config", write(tmp_path / "c.yaml", "")]) == Config()


ROUND_TRIPS = [
    Config(),
    Config(model="a b: c", quick=True, sizes=()),
    Config(optim=OptimConfig(lr=1e-5, betas=(0.1, 0.2), milestones=(0.5, 3.0), schedule="wsd")),
    Config(run=RunConfig(dir="runs/x", seed=2**40, epochs=0.1, trackers=(), workers=-1, resume="never")),
    Config(run=RunConfig(best="-eval/loss")),
    Config(model="-x"),
]


@pytest.mark.parametrize("config", ROUND_TRIPS, ids=range(len(ROUND_TRIPS)))
def test_a_saved_config_is_read_back(tmp_path, config):
    saved = yaml.safe_load(write_and_read(tmp_path, config))
    assert saved == to_dict(config) and not diff(saved, to_dict(config))
    assert parse(Config, ["--config", str(tmp_path / "c.yaml")]) == config


def write_and_read(folder: Path, config: Config) -> str:
    return Path(write(folder / "c.yaml", to_dict(config))).read_text()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: [1", "is not YAML"),
        ("- 1\n- 2", "found list"),
        ("just words", "found str"),
        (b"\xff\xfe\x00\x01", "is not YAML"),
    ],
)
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "c.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=words) as error:
        parse(Config, ["--config", str(path)])
    assert f"--config {path}" in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"run": {"notice": "rm -r /"}},
        {"run.notice": ["rm -r /"]},
        {"run": {"trackers": ["--run.notice=rm -r /"]}},
        {"run": {"trackers": ["--run.notice", "rm -r /"]}},
        {"run": {"notice=rm -r /; #": ""}},
        {"run": {"trackers": ["--run._notice=x", "--run.notice=rm -r /"]}},
    ],
)
def test_a_command_of_a_file_is_not_run(tmp_path, fields):
    """The file may be somebody else's: the command line has to say it, or that there is none."""
    file = write(tmp_path / "c.yaml", fields)
    with pytest.raises(UserError, match=r"no command of a file is run: give --run.notice on the command line too"):
        parse(Config, ["--config", file])
    if fields == {"run": {"notice": "rm -r /"}}:
        assert parse(Config, ["--config", file, "--run.notice="]).run.notice == ""
        assert parse(Config, ["--run.notice", "true", "--config", file]).run.notice == "true"


def test_a_flag_of_a_file_is_not_shortened(tmp_path):
    with pytest.raises(SystemExit):
        parse(Config, ["--config", write(tmp_path / "c.yaml", {"run": {"notic": "rm -r /"}})])


@pytest.mark.parametrize("name", ["absent.yaml", ""])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path, name):
    with pytest.raises(UserError, match=f"--config {tmp_path / name}: .*directory"):
        parse(Config, ["--config", str(tmp_path / name)])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"run": {"stepz": 3}}, "run.steps"),
        ({"run": {"steps": "many"}}, "many"),
        ({"run": {"steps": 1.5}}, "1.5"),
        ({"run": {"steps": [1, 2]}}, "2"),
        ({"run": {"resume": "perhaps"}}, "auto"),
        ({"quick": "perhaps"}, "perhaps"),
        ({"optim": {"betas": [0.5]}}, "betas"),
        ({"run": 3}, "run"),
    ],
)
def test_a_file_is_checked_like_flags(tmp_path, capsys, fields, words):
    with pytest.raises(SystemExit) as leaving:
        parse(Config, ["--config", write(tmp_path / "c.yaml", fields)])
    assert leaving.value.code == 2 and words in capsys.readouterr().err


def test_a_field_left_empty_in_a_file_does_not_become_a_word(tmp_path):
    """`trackers:` with nothing behind it is YAML's null: the default stays, and nothing is called None."""
    file = write(tmp_path / "c.yaml", "run:\n  trackers:\n  dir:\nmodel:\n")
    config = parse(Config, ["--config", file])
    assert (config.run.trackers, config.run.dir, config.model) == (Config().run.trackers, "", "")


def test_diff_names_fields_by_their_path():
    before = to_dict(Config())
    after = to_dict(Config(sizes=(3,), optim=OptimConfig(lr=1.0)))
    assert diff(before, before) == {}
    assert diff(before, after) == {"sizes": ([1, 2], [3]), "optim.lr": (5e-4, 1.0)}
    assert diff({"a": {"b": 1}}, {"c": 2}) == {"a.b": (1, None), "c": (None, 2)}
    assert flatten({"a": {"b": {"c": 1}, "d": [2]}}) == {"a.b.c": 1, "a.d": [2]}


def test_check_passes_the_defaults_and_the_least():
    check(Config())
    check(Config(run=RunConfig(steps=1, epochs=0, global_batch=1, micro_batch=1, log_every=1, keep=1)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_batch", 0),
        ("micro_batch", 0),
        ("log_every", 0),
        ("keep", 0),
        ("steps", -1),
        ("eval_every", -1),
        ("save_every", -2),
        ("stop_at", -1),
        ("threads", -1),
        ("workers", -2),
        ("seed", -1),
        ("epochs", 0),
        ("epochs", -1.5),
        ("epochs", float("nan")),
        ("epochs", float("inf")),
    ],
)
def test_check_refuses_numbers_that_no_run_can_have(name, value):
    with pytest.raises(UserError) as error:
        check(Config(run=replace(RunConfig(), **{name: value})))
    assert f"--run.{name.replace('_', '-')} {value}" in str(error.value)


@dataclass
class Own:
    """A recipe's settings that say for themselves what is asked of them."""

    width: int = setting(4, at_least=2)
    """Width of the model."""
    show: int = setting(1, at_least=0, on_resume=OnResume.ACCEPT)
    """Pictures to show."""
    depth: int = 1
    """Depth of the model."""


@dataclass
class OwnConfig:
    own: Own = field(default_factory=Own)
    run: RunConfig = field(default_factory=RunConfig)


def test_slices_are_for_exact_mode():
    with pytest.raises(UserError, match=r"^--run\.slices 4: only exact mode needs slices: give --run\.exact true"):
        check(Config(run=RunConfig(epochs=1, slices=4)))
    check(Config(run=RunConfig(epochs=1, slices=4, exact=True)))


def test_a_recipes_own_settings_say_what_is_asked_of_them(capsys):
    check(OwnConfig(Own(width=2, show=0, depth=-1)))
    with pytest.raises(UserError, match=r"^--own\.width 1: must be at least 2$"):
        check(OwnConfig(Own(width=1)))
    found = on_resume(OwnConfig())
    expected = {"own.width": OnResume.REFUSE, "own.show": OnResume.ACCEPT, "own.depth": OnResume.REFUSE}
    assert {name: what for name, what in found.items() if name.startswith("own.")} == expected
    assert found["run.keep"] is OnResume.ACCEPT and found["run.steps"] is OnResume.LENGTH
    assert parse(OwnConfig, ["--own.width", "7"]).own.width == 7
    with pytest.raises(SystemExit):
        parse(OwnConfig, ["--help"])
    assert "Width of the model. (default: 4)" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_what_may_change_on_resume_is_what_does_not_change_the_run():
    """A setting that becomes one of these by mistake would change runs silently."""
    refused = {name for name, what in on_resume(Config()).items() if what is OnResume.REFUSE}
    # These make the groups and the state of the optimizer, which a checkpoint has.
    groups = {f"optim.{name}" for name in ("name", "updates", "rates", "decays", "layer_decay", "freeze")}
    assert refused == groups | {"model", "quick", "sizes"} | {
        "run.seed",
        "run.global_batch",
        "run.batch_ramp",
        "run.micro_batch",
        "run.exact",
        "run.slices",
        "run.sync_bn",
    }
    if_accepted = {name for name, what in on_resume(Config()).items() if what is OnResume.IF_ACCEPTED}
    assert if_accepted == {name for name in on_resume(Config()) if name.startswith("optim.")} - groups


@pytest.mark.parametrize(
    "recipe, flags, rate, why",
    [
        ("cls", [], 1e-3, "training from scratch"),
        ("cls", ["--model", "m"], 2e-5, "fine-tuning"),
        ("img", [], 3e-3, "training from scratch"),
        ("img", ["--model", "m"], 1e-4, "fine-tuning"),
        ("seg", ["--model", "m"], 6e-5, "fine-tuning"),
        ("lm", [], 2e-3, "training from scratch"),
        ("lm", ["--model", "m"], 2e-5, "fine-tuning"),
        ("lm", ["--model", "m", "--lora.rank", "8"], 2e-4, "LoRA adapters"),
        ("lm", ["--model", "m", "--optim.lr", "1e-6"], 1e-6, ""),
    ],
)
def test_the_learning_rate_suits_what_is_trained(recipe, flags, rate, why):
    config, notes = chosen(parse(load(ROOT / "recipes" / f"{recipe}.py").Config, flags))
    assert config.optim.lr == rate
    assert notes == ([f"learning rate {rate:g}, for {why}; --optim.lr gives another"] if why else [])


def test_a_rate_from_scratch_for_a_pretrained_model_is_said():
    """As the config.yaml of a run from scratch has it, which --config gives to a fine-tuning."""
    recipe = load(ROOT / "recipes" / "cls.py").Config
    _, notes = chosen(parse(recipe, ["--model", "a/b", "--optim.lr", "1e-3"]))
    assert notes == ["learning rate 0.001 as given; for fine-tuning it would be 2e-05 without --optim.lr"]
    assert chosen(parse(recipe, ["--model", "a/b", "--optim.lr", "1e-4"]))[1] == []


def test_a_micro_batch_that_is_larger_than_the_step_is_said():
    asked = Config(run=RunConfig(global_batch=32, micro_batch=64))
    config, notes = chosen(asked)
    assert notes == ["--run.micro-batch 64 is larger than --run.global-batch 32: a step is one micro-batch"]
    assert config.run.micro_batch == 64  # as it was asked for
    assert chosen(Config(run=RunConfig(global_batch=32, micro_batch=32)))[1] == []


def test_a_second_optimizer_needs_a_rate():
    @dataclass
    class Two(Config):
        optim_d: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None))

    with pytest.raises(UserError, match=r"--optim-d\.lr is missing"):
        chosen(Two())


def test_a_recipe_that_chooses_no_rate_needs_one():
    with pytest.raises(UserError, match=r"default_lr"):
        chosen(Config(optim=OptimConfig(lr=None)))


@pytest.mark.parametrize("kind", [RunConfig, OptimConfig])
def test_the_comment_under_each_field_is_its_help(capsys, kind):
    with pytest.raises(SystemExit) as leaving:
        parse(kind, ["--help"])
    assert leaving.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    for field_, comment in zip(body[1::2], body[2::2], strict=True):
        assert f"--{field_.target.id.replace('_', '-')} " in shown
        assert " ".join(comment.value.value.split()[:5]) in shown


def python(code: str, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)


READ = """
from dataclasses import dataclass, field
from app import RunConfig, parse
@dataclass
class Config:
    run: RunConfig = field(default_factory=RunConfig)
print(parse(Config).run.steps)
"""


def test_a_misspelt_flag_ends_the_program_and_names_the_nearest():
    result = python(READ, "--run.glbal-batch", "8")
    assert result.returncode == 2 and result.stdout == ""
    assert "--run.glbal-batch" in result.stderr and "--run.global-batch" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_error_of_the_users_ends_the_program_with_its_words_alone():
    result = python(READ, "--config", "/no/such/file.yaml")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr == "error: --config /no/such/file.yaml: No such file or directory\n"


@pytest.mark.parametrize("words", [["no", "yes", "on"], ["010", "1:30", "0x1F"], ["1e3", "2026-11-25", "~a", "True"]])
def test_words_of_a_file_are_those_that_stand_there(words, tmp_path):
    """YAML alone would make a number, a truth or a date of each."""
    file = write(tmp_path / "c.yaml", f"model: {words[0]}\nrun:\n  trackers: [{', '.join(words[1:])}]\n")
    assert [str(word) for word in _expand_file(["--config", file])] == [
        f"--model={words[0]}",
        "--run.trackers",
        *words[1:],
    ]


def test_numbers_and_missing_values_of_a_file_are_taken(tmp_path):
    content = "optim: {lr: 1e-3, warmup: null}\nrun: {epochs: ~, steps: 1_0, eval_every: .inf}\nmodel: ''\n"
    file = write(tmp_path / "c.yaml", content)
    assert _expand_file(["--config", file]) == [
        "--optim.lr=1e-3",
        "--run.steps=1_0",
        "--run.eval-every=inf",
        "--model=",
    ]


def test_a_key_that_stands_twice_in_a_file_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"c.yaml is not YAML: the key steps stands there twice .* line 1"):
        parse(Config, ["--config", write(tmp_path / "c.yaml", "run: {steps: 1, steps: 2}")])


def test_reading_a_config_imports_no_torch():
    """--help and mistakes answer at once."""
    code = READ + "import sys; print([m for m in ('torch', 'transformers', 'wandb', 'accelerate') if m in sys.modules])"
    result = python(code, "--run.steps", "5")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "5\n[]\n"


def test_help_fills_its_lines(capsys, monkeypatch):
    """Wherever the source breaks a docstring's lines."""
    monkeypatch.setenv("COLUMNS", "1000")

    @dataclass
    class Broken:
        size: int = 1
        """Of the thing
        (in metres,
        .5 at least)."""

    with pytest.raises(SystemExit):
        parse(Broken, ["--help"])
    assert "Of the thing (in metres, .5 at least)." in capsys.readouterr().out


def test_a_field_that_did_not_exist_had_the_default_of_the_recipe():
    @dataclass
    class Part:
        needed: int
        betas: tuple[float, float] = (0.9, 0.99)

    @dataclass
    class Config:
        part: Part
        optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=3e-4, betas=(0.5, 0.9)))
        width: int = 8

    found = defaults(Config(Part(3)))
    assert found["optim.lr"] == 3e-4 and found["optim.betas"] == [0.5, 0.9] and found["width"] == 8
    assert found["part.betas"] == [0.9, 0.99] and "part.needed" not in found and found["optim.clip"] == 1.0
    before = {"optim": {"lr": 1.0}, "gone": 1}
    now = to_dict(Config(Part(3), OptimConfig(lr=3e-4, betas=(0.5, 0.9), clip=2.0)))
    expected = {"optim.lr": (1.0, 3e-4), "gone": (1, None), "part.needed": (None, 3), "optim.clip": (1.0, 2.0)}
    assert diff(before, now, found) == expected
