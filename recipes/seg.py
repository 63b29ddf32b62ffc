r"""Train a segmentation model in two or three dimensions: MONAI's U-Net from scratch, or one of transformers.

    accelerate launch recipes/seg.py
    accelerate launch recipes/seg.py --data.dims 3 --data.patch 32 --run.dir runs/seg3d
    accelerate launch --config_file accelerate_configs/ddp.yaml recipes/seg.py --data.path folder/ --data.patch 256
    accelerate launch recipes/seg.py --data.path camvid/ --data.classes classes.txt --data.ignore 11 --data.patch 256
    accelerate launch recipes/seg.py --model nvidia/segformer-b0-finetuned-ade-512-512 --optim.lr 6e-5 \
        --data.path folder/ --data.patch 512
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from app import EMAConfig, Needs, OptimConfig, Run, RunConfig, UserError, parse
from app.checkpoints.export import Card
from app.data.config import VolumeData
from app.tasks.from_scratch import UNetScratch, check_unet
from app.tasks.pretrained import check_installed
from app.tasks.segmentation.networks import (
    arguments_of,
    card_of,
    check_patches,
    image_channels,
    is_unet,
    load_segmenter,
    logits_of,
    unet,
)

if TYPE_CHECKING:
    from torch import nn

    from app.data.volumes.cases import Cases, Patches

USE_IT = (
    "python -c 'import json, monai, safetensors.torch as st; "
    """card = json.load(open("{model}/network.json")); net = monai.networks.nets.UNet(**card["arguments"]); """
    """net.load_state_dict(st.load_file("{model}/model.safetensors"))'"""
)
PICTURES = 4


@dataclass
class Config:
    """Train a segmentation model."""

    model: str = ""
    """Pretrained model: a Hub id or a folder, of transformers for two-dimensional images; or the folder of a U-Net that
    this recipe has trained. Default: train a U-Net from scratch, in the shape of --scratch."""
    loss: Literal["ce-dice", "bce-dice"] = "ce-dice"
    """Dice loss of each patch, plus cross-entropy over the classes (ce) or binary cross-entropy of each class (bce)."""
    scratch: UNetScratch = field(default_factory=UNetScratch)
    data: VolumeData = field(default_factory=VolumeData)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None, schedule="cosine", warmup=0.05))
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(
        default_factory=lambda: RunConfig(epochs=30, global_batch=16, micro_batch=4, eval_every=100, best="eval/dice")
    )

    def default_lr(self) -> tuple[float, str]:
        """Return the learning rate if --optim.lr is not given, and what it is for."""
        return (6e-5, "fine-tuning") if self.model else (5e-3, "training from scratch")


def load_data(config: Config, needs: Needs = Needs()) -> "tuple[Patches, dict[str, Cases], str]":
    """Return patches to train on, sets of whole images to evaluate on, and a line that describes them."""
    from app.data.volumes import volumes

    if config.model and not is_unet(config.model) and config.data.dims != 2:
        raise UserError(f"--model {config.model} takes images of two dimensions: use --data.dims 2, or leave it out")
    return volumes.load(config.data, image_channels(config.model) if config.model else 0, needs)


def build_model(
    config: Config, patches: "Patches", names: list[str], needs: Needs = Needs()
) -> "tuple[nn.Module, list[Card]]":
    """Build a model whose logits have the channels that the loss needs, and the parts to save with it."""
    from app.tasks.segmentation.losses import channels_of

    channels, about = channels_of(config.loss, len(names)), card_of(patches.cases)
    if config.model:
        model = load_segmenter(config.model, names if channels > 1 else names[1:], needs)
        if is_unet(config.model):
            return model, [Card(arguments=arguments_of(config.model), **about)]
        check_patches(model, config.model, patches.cases.channels, patches.cases.window)
        return model, [Card(**about)]
    check_unet(config.scratch, patches.cases.window)
    shape = config.scratch
    norm = {"instance": "INSTANCE", "batch": "BATCH", "group": ("GROUP", {"num_groups": 1})}[shape.norm]
    arguments = {
        "spatial_dims": config.data.dims,
        "in_channels": patches.cases.channels,
        "out_channels": channels,
        "channels": shape.channels,
        "strides": (2,) * (len(shape.channels) - 1),
        "num_res_units": shape.units,
        "norm": norm,
        "dropout": shape.dropout,
    }
    return unet(arguments), [Card(arguments=arguments, **about)]


def evaluate(run: Run, model: "nn.Module", cases: "Cases", loss_of: Callable[..., Any]) -> dict[str, float]:
    """Score the model on every whole image, once each, and draw the first few."""
    from app.data.rows import stack
    from app.tasks.segmentation.losses import classes_of
    from app.tasks.segmentation.panels import panel
    from app.tasks.segmentation.windows import sliding_window
    from app.training.scores.segmentation import Overlap

    scores, shown = run.scores_of(Overlap(cases.names, bool(cases.ignored))), dict[str, list]()
    for micro in run.evaluation(model, cases, stack, micro_batch=1):
        images, truth = micro.inputs["image"], micro.inputs["mask"]
        logits = sliding_window(partial(logits_of, model), images, cases.window, run.config.micro_batch, cases.overlap)
        predicted = classes_of(logits)
        scores.update(micro.weight, predicted, truth, loss=loss_of(logits, truth))
        if len(shown) < PICTURES:
            name = cases.cases[int(micro.ids[0])].name
            shown[f"eval/{name}"] = [panel(images[0], truth[0], predicted[0], len(cases.names), cases.palette)]
    run.log_images(shown)
    return scores.compute()


def main(config: Config) -> dict[str, float]:
    """Train the model and return its last scores."""
    from app.data.rows import stack
    from app.tasks.segmentation.losses import channels_of, dice_loss

    with Run(config) as run:
        check_installed("monai")
        with run.main_process_first():
            patches, eval_sets, about = load_data(config, run.needs)
        run.say(about)
        names, ignores = patches.cases.names, bool(patches.cases.ignored)
        loss_of = dice_loss(config.loss, channels_of(config.loss, len(names)), ignores)
        network, parts = build_model(config, patches, names, run.needs)
        model, optimizer = run.prepare(network, config.optim)
        for batch in run.batches(patches, stack, augment=patches.cut):
            for micro in batch.micros(model):
                loss = loss_of(logits_of(model, micro.inputs["image"]), micro.inputs["mask"])
                run.backward(loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, eval_sets, loss_of)
        return run.finish(model, *parts, use="" if config.model and not is_unet(config.model) else USE_IT)


if __name__ == "__main__":
    main(parse(Config))
