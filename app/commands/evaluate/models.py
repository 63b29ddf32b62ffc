"""Finished models as they are: which recipe scores them, and with which flags."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import storage
from app.commands.evaluate.subject import Subject, data_of, eval_flags, settings
from app.errors import UserError, whole_urls
from app.launching import trust
from app.rundir.foreign import fields_of, section
from app.tasks.graphs.shape import read_config
from app.tasks.kinds import kind_of
from app.tasks.pretrained import ADAPTERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from app.commands.evaluate.command import Options

PARTS = ("config.json", "network.json", ADAPTERS, "model.safetensors")
MASKED = "0.15"  # share of the tokens, as usual
LONGEST = 512  # tokens of a text, for a model that does not say how many it takes


def is_model(place: Path) -> bool:
    """Tell whether a place is a folder with a model, or no folder: then it may be a Hub id."""
    from app.rundir import history

    history.check_reachable(place)
    files = storage.at(place)
    if files.exists("run.json"):
        return False
    if files.is_remote:
        return any(files.is_file(name) for name in PARTS)
    return not place.exists() or any((place / name).is_file() for name in PARTS)


def of_model(options: "Options", user_flags: list[str]) -> Subject:
    """Return a finished model as it is, scored by the recipe that has trained it, or by one for its task.

    Args:
        user_flags: the user's own flags of the recipe.

    Raises:
        UserError: there is no such model, no recipe scores it, or it lacks data to be scored on.
    """
    name = whole_urls(str(options.run))
    if asked := [flag for flag, on in (("--best", options.best), ("--step", options.step)) if on]:
        raise UserError(f"{asked[0]} chooses a checkpoint of a run, and {name} is a finished model: leave it out")
    if options.weights != "auto":
        raise UserError(
            f"--weights {options.weights}: {name} is a finished model, with weights of one kind: leave it out"
        )
    code, file, config = _origin(options.run, options.recipe, options.trust_code)
    place = str(storage.at(options.run).down()) if storage.at(options.run).is_remote else name
    data = data_of(options, config)
    kind = _kind(place, config)
    flags = ["--run.trackers"] if file is None else settings(file, config)
    if not data.path and file is None:
        raise UserError(f"{name}: give the data to evaluate it on after it, for example data.csv; they need labels")
    if data.path:  # and nothing else is needed
        flags += ["--data.path="] if kind in ("seg", "graph") else ["--data.path"]
        loss = config.get("loss")
        flags += ["--loss.weights"] if isinstance(loss, dict) and loss.get("weights") else []
    flags += [
        *_flags_of(kind, place, config, user_flags),
        "--model",
        place,
        *eval_flags(data.path, data.split or options.split, config),
    ]
    code = code or _recipe(kind, options.trust_code)
    return Subject({"model": name}, name, code.file, flags, code.imports)


def _origin(folder: Path, asked: str, allowed: bool) -> tuple[trust.Code | None, Path | None, dict[str, Any]]:
    """Find what trained a model: the recipe, the file of its settings, and these.

    Args:
        asked: the recipe that the user names.
        allowed: see `trust.checked`.

    Raises:
        UserError: the recipe cannot evaluate a model, or nobody vouches for it.
    """
    from app.rundir import history

    code, file = trust.Code(Path(asked)) if asked else None, None
    if folder.name == "model" and storage.at(folder.parent).exists("run.json"):
        run = history.read(folder.parent)
        code = code or trust.recipe_of(run.folder, run.record.recipe_folder, allowed)
        file = storage.at(folder.parent).down("config.yaml")
    elif storage.at(folder).is_file("training_config.yaml"):  # python -m app export wrote it
        folder = storage.at(folder).down()
        recipes = _recipes_in(folder)
        if not code and len(recipes) != 1:
            raise UserError(f"{folder} has {len(recipes)} files that may be its recipe: name it with --recipe")
        file, code = folder / "training_config.yaml", code or trust.checked(recipes[0], "", allowed)
    config = fields_of(file) if file else {}
    if config is None:
        raise UserError(f"{file} is damaged, and has the settings of the recipe: evaluate with --recipe elsewhere")
    data = config.get("data")
    if file and not ("model" in config and isinstance(data, dict) and "eval_path" in data):
        raise UserError(
            f"{folder} was trained by a recipe without --model or --data.eval-path, which cannot load it: evaluate a "
            "checkpoint instead, by naming the run's folder"
        )
    return code, file, config


def _recipes_in(folder: Path) -> list[Path]:
    """List the Python files of an exported model, without those of its network, which config.json names."""
    networks = {
        f"{str(place).partition('.')[0]}.py"
        for place in section(fields_of(folder / "config.json"), "auto_map").values()
    }
    return [file for file in folder.glob("*.py") if file.name not in networks]


def _kind(name: str, config: dict[str, Any]) -> str:
    """Return the recipe for a model's task."""
    if Path(name, "network.json").is_file():
        return "seg"
    if read_config(name) is not None:
        return "graph"
    if Path(name, ADAPTERS).is_file() and not Path(name, "config.json").is_file():
        raise UserError(
            f"{name} holds adapters and no whole model: evaluate the run that has trained them, by naming its folder"
        )
    classes = _config(name).architectures or []
    kind = kind_of(classes)
    if kind is None:
        raise UserError(
            f"{name} is a {', '.join(classes) or 'model without a task'}: evaluate takes classifiers of texts and "
            "images, taggers, detectors, models that write texts, and what recipes/seg.py has trained"
        )
    if kind.recipe == "seg":
        raise UserError(
            f"{name} was not trained by recipes/seg.py, whose images have mean 0 and deviation 1 each; its scores "
            f"would say little. Train it further: accelerate launch recipes/seg.py --model {name} --data.path ..."
        )
    return kind.recipe


def _config(name: str) -> "PreTrainedConfig":
    from transformers import AutoConfig

    from app.tasks.detection.networks import make_known

    make_known()
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        there = "" if Path(name).exists() else "there is no such folder of a run or a model, and as a Hub id it fails: "
        raise UserError(f"{name}: {there}{str(error).splitlines()[0]}") from None


def _recipe(kind: str, allowed: bool) -> trust.Code:
    """Return the recipe that scores a kind of models: this installation's, or one in recipes/ that is vouched for."""
    installed, here = trust.RECIPES / f"{kind}.py", Path("recipes", f"{kind}.py")
    if installed.is_file():
        return trust.Code(installed)
    if not here.is_file():
        raise UserError(f"recipes/{kind}.py, which scores such a model, is not here: give the file with --recipe")
    return trust.checked(here, str(here.resolve().parent), allowed)


def _flags_of(kind: str, name: str, config: dict[str, Any], user_flags: list[str]) -> list[str]:
    """Return the flags that a model itself says: the order of its classes, and how it takes its inputs."""
    asked = {word.partition("=")[0] for word in user_flags}
    if kind in ("cls", "img", "tag", "det"):
        model = _config(name)
        amounts = model.problem_type == "regression" or (not model.problem_type and model.num_labels == 1)
        names = [str(label) for _, label in sorted((model.id2label or {}).items())]
        flags = [] if amounts or "--data.classes" in asked else ["--data.classes", *names]
        if kind == "cls" and "--data.problem" not in asked and (amounts or model.problem_type):
            flags += ["--data.problem", "regression" if amounts else str(model.problem_type)]
        if kind in ("cls", "tag") and not config and "--data.max-length" not in asked:
            from app.tasks.pretrained import longest_input

            flags += ["--data.max-length", str(longest_input(model) or LONGEST)]
        return flags
    if kind == "lm":
        masked = any(each.endswith("ForMaskedLM") for each in _config(name).architectures or ())
        return ["--mask.rate", MASKED] if masked and not config and "--mask.rate" not in asked else []
    if kind == "graph":
        return _of_graph(name, asked)
    return _of_segmenter(name, config, asked) if kind == "seg" else []


def _of_graph(name: str, asked: set[str]) -> list[str]:
    card = read_config(name) or {}
    flags = [] if "--data.classes" in asked else ["--data.classes", *card["classes"]]
    fanouts = [str(each) for each in card["fanouts"]]
    if "--data.undirected" not in asked:
        flags += ["--data.undirected", str(card["undirected"])]
    return [*flags, *([] if asked & {"--data.fanout", "--data.eval-fanout"} else ["--data.fanout", *fanouts])]


def _of_segmenter(name: str, config: dict[str, Any], asked: set[str]) -> list[str]:
    from app.tasks.segmentation.networks import checked_card

    card = checked_card(name)
    flags = []
    if "--data.classes" not in asked and not config.get("data", {}).get("classes"):
        flags += ["--data.values", *map(str, card["values"]), "--data.names", *card["classes"]]
    if not config:
        sides = [str(side) for side in card["window"]]
        flags += ["--data.dims", str(len(sides)), "--data.patch", *sides, "--data.overlap", str(card["overlap"])]
        flags += ["--loss", "bce-dice"] if card["outputs"] == 1 else []
    return flags
