"""Networks that segment images: MONAI's U-Net as recipes/seg.py writes it, and models of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from app.checkpoints.export import CARD
from app.config.needs import EVERYTHING, Needs
from app.data.reading import read_fields
from app.errors import UserError
from app.tasks.pretrained import check_images, head_of, load_model, loading

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from app.data.volumes.cases import Cases


def card_of(cases: "Cases") -> dict[str, Any]:
    """Return what the finished model's card says of its inputs and outputs, see `read_card`."""
    return {
        "window": list(cases.window),
        "overlap": cases.overlap,
        "channels": cases.channels,
        "classes": cases.names,
        "values": cases.values.tolist(),
        "colours": None if cases.palette is None else cases.palette.tolist(),
    }


def read_card(folder: str) -> dict[str, Any] | None:
    """Read the card that recipes/seg.py writes with a model; None if there is none.

    It has `arguments`, those of MONAI's UNet, if the model is one; `window` and `overlap` of the sliding window;
    `channels` of an image; and, in the order of the outputs, the names of the `classes`, their `values` in the masks,
    and their `colours`, [classes, 3], or null.
    """
    file = Path(folder) / CARD
    return read_fields("--model", file) if file.is_file() else None


def checked_card(folder: str) -> dict[str, Any]:
    """Return the card of a model that recipes/seg.py has trained, with the number of its `outputs`.

    Raises:
        UserError: there is no card, or one of an earlier version, which lacks the values of the masks.
    """
    card = read_card(folder)
    if card is None:
        raise UserError(
            f"{folder} has no {CARD}, so recipes/seg.py has not trained it: train it further, with --model {folder}"
        )
    if "values" not in card:
        raise UserError(
            f"{Path(folder) / CARD} is of an earlier version: add the masks' values in the order of the classes, as "
            '"values": [0, 255], and "overlap": 0.25, "channels": 1, "colours": null'
        )
    single = "arguments" in card and card["arguments"]["out_channels"] == 1
    if "arguments" not in card:
        from transformers import AutoConfig

        with loading(folder):
            single = AutoConfig.from_pretrained(folder, trust_remote_code=False).num_labels == 1
    return {**card, "outputs": 1 if single else len(card["classes"])}


def is_unet(folder: str) -> bool:
    """Tell whether a folder holds a U-Net that recipes/seg.py has written."""
    return "arguments" in (read_card(folder) or {})


def arguments_of(folder: str) -> dict[str, Any]:
    """Return the arguments of the U-Net in a folder; see `is_unet`."""
    return (read_card(folder) or {})["arguments"]


def load_segmenter(name: str, labels: Sequence[str], needs: Needs = EVERYTHING) -> nn.Module:
    """Load the segmentation model that --model names, with an output for each of these labels.

    Raises:
        UserError: it cannot be loaded; or it is a U-Net with another number of outputs.
    """
    if is_unet(name):
        network = _load_unet(name)
        outputs = arguments_of(name)["out_channels"]
        if outputs != len(labels):
            raise UserError(
                f"--model {name} has {outputs} outputs, and these masks with this --loss need {len(labels)}"
            )
        return network
    from transformers import AutoModelForSemanticSegmentation

    head = head_of(labels)
    model = load_model(AutoModelForSemanticSegmentation, name, needs=needs, ignore_mismatched_sizes=True, **head)
    # Some have a second head, whose loss only they compute. DDP waits for a gradient of each parameter that wants one.
    if (auxiliary := getattr(model, "auxiliary_head", None)) is not None:
        auxiliary.requires_grad_(False)
    return model


def finished(folder: str) -> nn.Module:
    """Load the finished model in a folder, as it is."""
    if is_unet(folder):
        return _load_unet(folder)
    from transformers import AutoModelForSemanticSegmentation

    return load_model(AutoModelForSemanticSegmentation, folder)


def unet(arguments: dict[str, Any]) -> nn.Module:
    """Build MONAI's U-Net."""
    from monai.networks.nets import UNet

    network = UNet(**arguments)
    # FSDP shards these one by one. If it sharded whole units, gradients that meet at a skip would add in another order.
    network._no_split_modules = ["Conv2d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d"]  # type: ignore[assignment]  # a list
    return cast(nn.Module, network)


def _load_unet(folder: str) -> nn.Module:
    from safetensors.torch import load_file

    network = unet(arguments_of(folder))
    with loading(folder, "weights"):
        try:
            network.load_state_dict(load_file(Path(folder) / "model.safetensors"))
        except RuntimeError as error:  # names or shapes of another network
            raise ValueError(error) from None
    return network


def image_channels(name: str) -> int:
    """Return how many channels the images have that the model named by --model takes."""
    if card := read_card(name):
        return int(card["channels"] if "channels" in card else card["arguments"]["in_channels"])
    from transformers import AutoConfig

    with loading(name):
        return getattr(AutoConfig.from_pretrained(name, trust_remote_code=False), "num_channels", 3)


def check_patches(model: nn.Module, name: str, channels: int, sides: Sequence[int]) -> None:
    """Raise a UserError if the model of transformers that --model names does not take patches of this shape."""
    flags = f"--model {name} with --data.patch {' '.join(map(str, sides))}"
    check_images(cast("PreTrainedModel", model), flags, {"pixel_values": torch.zeros(1, channels, *sides)})


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """Return logits [images, classes, *sides] of the same sides as the images."""
    from torch.nn.functional import interpolate

    output = model(images)
    logits = getattr(output, "logits", output)
    if logits.shape[2:] != images.shape[2:]:
        logits = interpolate(logits, images.shape[2:], mode="bilinear", align_corners=False)
    return logits
