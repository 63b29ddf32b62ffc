r"""Train an image classifier: from scratch on data that needs no download, or from a pretrained model on your own.

    accelerate launch recipes/img.py
    accelerate launch --config_file accelerate_configs/fsdp_cpu.yaml recipes/img.py --run.dir runs/fsdp
    accelerate launch recipes/img.py --model microsoft/resnet-18 --optim.lr 1e-4 \
        --data.path photos/ --augment.flip 0.5
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from app import EMAConfig, Needs, OptimConfig, Run, RunConfig, parse
from app.data.config import Augment, ClassData
from app.tasks.class_loss import ClassLoss, ClassLossConfig
from app.tasks.from_scratch import VisionScratch, check_vision
from app.tasks.pretrained import check_images, head_of, load_model, load_processor

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from app.data.images.labeled_images import Images, TrainingImages
    from app.data.images.processor import ImageProcessor
    from app.data.tables.labels import Labels

USE_IT = (
    "python -c 'from transformers import pipeline; "
    """print(pipeline("image-classification", "{model}")("some.png"))'"""
)


@dataclass
class Config:
    """Train an image classifier."""

    model: str = ""
    """Pretrained model: a Hub id (timm/NAME for one of timm's, if timm is installed) or a folder. Default: train from
    scratch, in the shape of --scratch."""
    loss: ClassLossConfig = field(default_factory=lambda: ClassLossConfig(smoothing=0.1))
    scratch: VisionScratch = field(default_factory=VisionScratch)
    data: ClassData = field(default_factory=ClassData)
    augment: Augment = field(default_factory=Augment)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None, warmup=0.1, weight_decay=0.05))
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(epochs=12, micro_batch=32, best="eval/accuracy"))

    def default_lr(self) -> tuple[float, str]:
        """Return the learning rate if --optim.lr is not given, and what it is for."""
        return (1e-4, "fine-tuning") if self.model else (3e-3, "training from scratch")


def load_data(
    config: Config, needs: Needs = Needs()
) -> "tuple[TrainingImages, dict[str, Images], Labels, ImageProcessor, str]":
    """Return training images and sets of evaluation images, classes, the image processor, and a description."""
    from app.data.images import labeled_images

    tables, labels = labeled_images.load_labelled(config.data, needs)
    column = labeled_images.ImageColumn(tables.train, config.data.image)
    if config.model:
        processor = load_processor(config.model, config.data.size)
    else:
        processor = labeled_images.own_processor(column, config.data.size)
    limit = config.data.cache_gb
    train = labeled_images.training_images(tables, config.data, processor, labels, not config.model)
    columns = {name: labeled_images.ImageColumn(table, config.data.image) for name, table in tables.sets.items()}
    eval_sets = {
        name: labeled_images.load_images(column, processor, limit, labels.sets[name])
        for name, column in columns.items()
    }
    if not config.model:
        processor.image_mean, processor.image_std = train.statistics(processor.rescale_factor)
    return train, eval_sets, labels, processor, labeled_images.describe(tables, labels, train, eval_sets)


def build_model(
    config: Config,
    labels: "Labels",
    train: "TrainingImages",
    collate: Callable[[list], Any],
    needs: Needs = Needs(),
) -> "PreTrainedModel":
    """Build a transformers model with a head for these classes, and check that it takes these images."""
    from transformers import AutoModelForImageClassification

    head = head_of(labels.names)
    size = train.shape[-1]
    if config.model:
        settings = {**head, "ignore_mismatched_sizes": True}
        model = load_model(AutoModelForImageClassification, config.model, needs=needs, **settings)
    else:
        check_vision(config.scratch, size)
        model = AutoModelForImageClassification.from_config(vision_config(config.scratch, size, **head))
    check_images(model, f"--model {config.model}" if config.model else f"--data.size {size}", collate([train.example]))
    return model


def vision_config(shape: VisionScratch, size: int, **head: Any) -> "PreTrainedConfig":
    """Build the config of a model for images of this size."""
    from transformers import BitConfig, ResNetConfig, ViTConfig

    if shape.kind == "vit":
        return ViTConfig(
            image_size=size,
            patch_size=size // shape.patches,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=4 * shape.width,
            hidden_dropout_prob=shape.dropout,
            attention_probs_dropout_prob=shape.dropout,
            **head,
        )
    widths, depths = [shape.width, 2 * shape.width, 4 * shape.width], [shape.layers] * 3
    if shape.norm == "batch":
        return ResNetConfig(embedding_size=shape.width, hidden_sizes=widths, depths=depths, layer_type="basic", **head)
    # Big Transfer: a ResNet with GroupNorm and standardised weights. transformers' ResNet class has neither.
    return BitConfig(embedding_size=shape.width, hidden_sizes=widths, depths=depths, num_groups=8, **head)


def evaluate(
    run: Run, model: "nn.Module", rows: "Images", collate: Callable[[list], Any], labels: "Labels"
) -> dict[str, float]:
    """Score the model on every evaluation image, once each, and draw the confusion matrix."""
    from torch.nn.functional import cross_entropy

    from app.tasks.vision.pictures import MOST_CLASSES, confusion
    from app.training.scores.classification import Classification

    classes = len(labels.names)
    counts = Classification(labels.names, top=5 if classes > 5 else 0)
    scores = run.scores_of(counts)
    for micro in run.evaluation(model, rows, collate):
        logits, truth = model(pixel_values=micro.inputs["pixel_values"]).logits, micro.inputs["labels"]
        scores.update(micro.weight, logits, truth, loss=cross_entropy(logits, truth))
    results = scores.compute()
    if classes <= MOST_CLASSES:
        run.log_images({"eval/confusion": [confusion(counts.matrix().numpy(), labels.names)]})
    return results


def main(config: Config) -> dict[str, float]:
    """Train the model and return its last scores."""
    from app.data.images.augment import ImageCollate, augmentation

    with Run(config) as run:
        with run.main_process_first():
            train, eval_sets, labels, processor, about = load_data(config, run.needs)
        run.say(about)
        collate, augment = ImageCollate.of(processor), augmentation(config.augment, train.rows)
        loss_of = ClassLoss(config.loss, labels.names, labels.known_values)
        model, optimizer = run.prepare(build_model(config, labels, train, collate, run.needs), config.optim)
        for batch in run.batches(train.rows, collate, weights=loss_of.weights, augment=augment):
            for micro in batch.micros(model):
                logits = model(pixel_values=micro.inputs["pixel_values"]).logits
                run.observe_rows(partial(loss_of.by_row, logits, micro.inputs), micro)
                loss = loss_of(logits, micro.inputs)
                run.backward(loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, eval_sets, collate, labels)
        return run.finish(model, processor, use=USE_IT)


if __name__ == "__main__":
    main(parse(Config))
