"""Pretrained models: loading them, explaining why one cannot be loaded, and checks before training."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from app.config.needs import EVERYTHING, Needs
from app.data.images.processor import ImageProcessor
from app.data.reading import read_fields, read_json
from app.data.text.tokenizer import check_tokenizer
from app.distributed import made_once
from app.distributed.environment import is_main_process
from app.errors import UserError, is_installed, not_installed
from app.tasks import hollow
from app.tasks.vocabulary import check_ids, check_sizes, check_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# The positions of these kinds of models start after the padding token's id.
AFTER_PADDING = {
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "camembert",
    "xmod",
    "data2vec-text",
}
AFTER_PADDING |= {"longformer", "luke", "mpnet", "ibert", "esm", "layoutlmv3", "lilt", "markuplm"}
# The files of a model's folder that each part of it is made of, the usual one first.
PARTS = {
    "configuration": ("config.json",),
    "tokenizer": ("tokenizer.json", "*token*", "*vocab*", "*.model", "*.tiktoken", "tekken.json"),
    "image processor": ("preprocessor_config.json", "processor_config.json"),
    "weights": ("model.safetensors", "*.safetensors", "*.bin", "*.index.json"),
}

ADAPTERS = "adapter_config.json"
"""The file by which peft knows adapters."""


def load_tokenizer(
    name: str,
    max_length: int,
    flag: str = "--data.max-length",
    in_words: bool = False,
    pair: bool = False,
    unused: Sequence[str] = (),
) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of the model that --model names, for texts of max_length tokens.

    Args:
        flag: the flag that gives max_length, for errors.
        in_words: whether it gets texts as lists of words; RoBERTa's then needs to put a space before each.
        pair: whether it gets texts in pairs.
        unused: the names of special tokens that it is never asked for, such as `mask_token`.

    Raises:
        UserError: it cannot be loaded, model or tokenizer do not take texts of this length, or the model lacks
            embeddings for its tokens.
    """
    tokenizer, config = read_tokenizer(name, max_length, flag, in_words)
    check_vocabulary(name, config, tokenizer, unused, pair)
    return tokenizer


def read_tokenizer(
    name: str, max_length: int, flag: str = "--data.max-length", in_words: bool = False
) -> "tuple[PreTrainedTokenizerBase, PreTrainedConfig]":
    """Load a tokenizer as `load_tokenizer` does, and its model's config. Whether they fit is left to be checked."""
    from transformers import AutoConfig, AutoTokenizer

    with loading(name, "tokenizer"):
        if Path(name).is_dir() and not _has(Path(name), "tokenizer"):
            raise OSError("there is no tokenizer")  # transformers makes up an empty one for some kinds of models
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, **({"add_prefix_space": True} if in_words else {})
        )
    longest = longest_input(config)
    if longest is not None and max_length > longest:
        raise UserError(
            f"{flag} {max_length} is more than the {longest} positions that --model {name} has: use a smaller one"
        )
    return check_tokenizer(tokenizer, max_length, flag), config


def load_model(
    kind: type[Any], name: str, once: bool = False, needs: Needs = EVERYTHING, **settings: Any
) -> "PreTrainedModel":
    """Load the model that --model names.

    Args:
        kind: the class of transformers that loads it, such as AutoModelForSequenceClassification.
        once: whether a large one may be loaded on rank 0 alone, as `run.prepare` will shard or split it.
        needs: of the run, `run.needs`.
        settings: for `from_pretrained`. Weights are loaded as float32: the profile chooses the precision.

    Raises:
        UserError: it cannot be loaded; its weights do not fit its config; or it is evaluated as it is, and would need
            new weights.
    """
    import torch
    from transformers import AutoConfig

    may_differ = bool(settings.get("ignore_mismatched_sizes"))
    asked, new = {"dtype": torch.float32, **settings, "ignore_mismatched_sizes": True}, []

    with loading(name):
        padding = {key: settings[key] for key in ("pad_token_id",) if key in settings}
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **padding)
    check_ids(name, config, config)

    def load() -> "PreTrainedModel":
        with loading(name, "weights"):
            model, loading_info = kind.from_pretrained(name, trust_remote_code=False, **asked, output_loading_info=True)
        check_ids(name, config, getattr(model, "generation_config", None), "generation_config.json")
        check_sizes(name, model, loading_info["mismatched_keys"], may_differ)
        new.extend(sorted({*loading_info["missing_keys"], *(key[0] for key in loading_info["mismatched_keys"])}))
        return model

    def shapes() -> "PreTrainedModel":
        with loading(name, "configuration"):
            return hollow.load_shapes(kind, name, asked)

    if not needs.weights:
        return shapes()
    model = made_once.make(load, shapes) if once else load()
    if new and needs.complete:
        raise UserError(
            f"{name} has no weights that fit {new[0]}{f' and {len(new) - 1} others' if new[1:] else ''} of a "
            f"{type(model).__name__}, and new ones would say nothing: train it for this task first, with --model {name}"
        )
    return model


def head_of(names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a model's config that name its outputs."""
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def load_processor(name: str, size: int = 0) -> ImageProcessor:
    """Load the image processor of the model that --model names, the kind that needs no torchvision.

    Args:
        size: height and width that it brings images to, in pixels; 0: its own size.

    Raises:
        UserError: it cannot be loaded.
    """
    from transformers import AutoConfig

    # transformers 5.17 refuses the name that it exports where torchvision is missing, whatever the backend.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    check_timm(name)
    with loading(name, "image processor"):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        check_timm(name, config.model_type)
        if config.model_type == "timm_wrapper":
            processor = _timm_processor(config)
        else:
            processor = AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=False)
    if size:
        processor.size = type(processor.size)(height=size, width=size)
        processor.do_center_crop = False
    return processor


def _timm_processor(config: "PreTrainedConfig") -> ImageProcessor:
    """Make the image processor that a model of timm was trained for; timm's own needs torchvision."""
    from transformers import ViTImageProcessorPil

    about = config.pretrained_cfg or {}
    _, height, width = about.get("input_size", (3, 224, 224))
    normalization = {k: about[name] for k, name in (("image_mean", "mean"), ("image_std", "std")) if name in about}
    return cast(ImageProcessor, ViTImageProcessorPil(size={"height": height, "width": width}, **normalization))


def check_timm(name: str, kind: str = "") -> None:
    """Raise a UserError if a model needs timm, and timm is not installed."""
    if name.startswith("timm/") or kind == "timm_wrapper":
        check_installed("timm", f"--model {name} is one of timm's, and ")


def check_images(model: "PreTrainedModel", flags: str, inputs: dict) -> None:
    """Raise a UserError if a model does not take images like these.

    Args:
        flags: the flags that give the model or the size of the images, for errors.
        inputs: a micro-batch.
    """
    import torch

    training, pixels = model.training, inputs["pixel_values"]
    try:
        with torch.no_grad():
            model.eval()(pixel_values=pixels)
    except (ValueError, RuntimeError) as error:
        shape = " x ".join(map(str, pixels.shape[1:]))
        raise UserError(f"{flags}: the model does not take images of {shape}: {error}") from error
    model.train(training)


def check_installed(package: str, why: str = "") -> None:
    """Raise a UserError if a package is not installed; `why` begins its message."""
    if not is_installed(package):
        raise UserError(f"{why}{not_installed(package)}")


def longest_input(config: "PreTrainedConfig") -> int | None:
    """Return for how many tokens a model has positions, or None if it has no table of them, as with rotary ones."""
    config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    relative = getattr(config, "rope_parameters", None) or not getattr(config, "position_biased_input", True)
    if relative or not isinstance(positions, int) or positions < 1:
        return None
    return positions - (config.pad_token_id + 1 if config.model_type in AFTER_PADDING else 0)


@contextmanager
def loading(name: str, part: str = "configuration") -> Iterator[None]:
    """Explain why the model that --model names cannot be loaded; only the main process prints transformers' reports.

    Args:
        part: what is loaded apart from the configuration, one of PARTS.
    """
    from safetensors import SafetensorError

    with _quiet():
        try:
            yield
        except SafetensorError as error:
            raise UserError(
                f"--model {name} cannot be loaded: {_damaged(name)} is damaged or cut short ({error}); copy or "
                "download it again"
            ) from error
        except ImportError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"--model {name} needs what is not installed: {reason}") from error
        except Exception as error:
            # tokenizers raises a plain Exception.
            if not isinstance(error, OSError | ValueError) and type(error) is not Exception:
                raise
            raise UserError(f"--model {name} cannot be loaded: {_reason(name, part, error)}") from error


def _reason(name: str, part: str, error: Exception) -> str:
    """Say what is wrong with a model, and what to do: a folder may lack a file, another name is taken for a Hub id."""
    reason, folder = " ".join(str(error).split()), Path(name)
    if "custom code" in reason:
        return "it needs code that comes with it (auto_map), and code of a model is never run here"
    if not folder.is_dir():
        return (
            f"{reason} Give a folder that save_pretrained wrote, tokenizer or image processor included, or a Hub id; "
            f"without a network, download it elsewhere (`hf download {name} --local-dir FOLDER`) and give the folder"
        )
    if told := _damaged_json(folder):
        return f"{told}: copy or download it again"
    if (folder / ADAPTERS).is_file() and not _has(folder, "configuration"):
        base = read_fields("--model", folder / ADAPTERS).get("base_model_name_or_path")
        return (
            f"this folder holds adapters alone ({ADAPTERS}), for the model {base}. Merge both into a whole model, as "
            f"docs/lm.md says under Adapters, and give that; or give --model {base}"
        )
    for lacking in ("configuration", part):
        if not _has(folder, lacking):
            return (
                f"this folder has no {lacking} ({PARTS[lacking][0]}). Copy it from the folder or Hub id that the model "
                "was trained from, or write it there with save_pretrained"
            )
    return f"{reason} Give a folder whose files save_pretrained wrote, tokenizer or image processor included"


def _damaged_json(folder: Path) -> str:
    """Name the first json file of a folder that cannot be read, and say why; nothing if all can be."""
    for file in sorted(folder.glob("*.json")):
        try:
            read_json("", file)
        except UserError as error:
            return str(error).strip()
    return ""


def _has(folder: Path, part: str) -> bool:
    return any(file for pattern in PARTS[part] for file in folder.glob(pattern))


def _damaged(name: str) -> str:
    """Return the file of weights in a folder that cannot be read."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(name).glob("*.safetensors")):
        try:
            safe_open(file, "pt")
        except SafetensorError:
            return str(file)
    return "a file of its weights"


@contextmanager
def _quiet() -> Iterator[None]:
    """Show transformers' reports only on the main process, and its progress bars only on a terminal."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if not is_main_process():
        logging.set_verbosity_error()
    if not (is_main_process() and sys.stderr.isatty()):
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
