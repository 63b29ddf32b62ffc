r"""Train a detector of objects: from scratch on data that needs no download, or from a pretrained model on your own.

    accelerate launch recipes/det.py
    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/det.py --run.dir runs/ddp
    accelerate launch recipes/det.py --model hustvl/yolos-tiny \
        --data.path voc/ --augment.flip 0.5
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app import EMAConfig, Needs, OptimConfig, Run, RunConfig, parse
from app.data.config import BoxAugment, BoxData
from app.tasks.from_scratch import DetectorScratch, check_detector
from app.tasks.pretrained import check_images

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from app.data.boxes.detections import Detections
    from app.data.images.processor import ImageProcessor

USE_IT = (
    "python -c 'from transformers import pipeline; "
    """print(pipeline("object-detection", "{model}", trust_remote_code=True)("some.png", threshold=0.3))'"""
)
PICTURES = 4


@dataclass
class Config:
    """Train a detector of objects."""

    model: str = ""
    """Pretrained model of the DETR family: a Hub id or a folder; or the folder of a detector that this recipe has
    trained. Default: train from scratch, in the shape of --scratch."""
    scratch: DetectorScratch = field(default_factory=DetectorScratch)
    data: BoxData = field(default_factory=BoxData)
    augment: BoxAugment = field(default_factory=BoxAugment)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=None, warmup=0.1))
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(default_factory=lambda: RunConfig(epochs=20, global_batch=16, micro_batch=8))

    def default_lr(self) -> tuple[float, str]:
        """Return the learning rate if --optim.lr is not given, and what it is for."""
        return (5e-5, "fine-tuning") if self.model else (2e-3, "training from scratch")


def load_data(
    config: Config, needs: Needs = Needs()
) -> "tuple[Detections, dict[str, Detections], list[str], ImageProcessor, str]":
    """Return training images and sets of evaluation images with boxes, classes, the image processor, a description."""
    from app.data.boxes import detections
    from app.tasks.detection.networks import detector_processor

    tables, boxes_by_set, names = detections.load_boxes(config.data, needs)
    if config.model:
        processor = detector_processor(config.model, config.data.size)
    else:
        processor = detections.own_processor(boxes_by_set["train"].column, config.data.size)
    sets = {name: detections.load_images_of(table, processor, config.data) for name, table in boxes_by_set.items()}
    train_rows = sets.pop("train")
    if not config.model:
        processor.image_mean, processor.image_std = train_rows.images.statistics(processor.rescale_factor)
    return train_rows, sets, names, processor, detections.describe(tables, names, train_rows, sets)


def build_model(
    config: Config, names: list[str], collate: Callable[[list], Any], rows: "Detections", needs: Needs = Needs()
) -> "PreTrainedModel":
    """Build a detector of these classes, and check that it takes these images."""
    from app.tasks.detection.networks import load_detector, new_detector

    inputs = collate([rows[0]])
    if config.model:
        model = load_detector(config.model, names, needs)
    else:
        check_detector(config.scratch)
        model = new_detector(config.scratch, names, inputs["pixel_values"].shape[1])
    check_images(model, f"--model {config.model}" if config.model else "--scratch", inputs)
    return model


def evaluate(
    run: Run,
    model: "nn.Module",
    rows: "Detections",
    collate: Callable[[list], Any],
    names: list[str],
    processor: "ImageProcessor",
) -> dict[str, float]:
    """Score the model on every evaluation image, once each, and draw the first few."""
    from app.tasks.detection.networks import boxes_of, truth_of
    from app.tasks.detection.pictures import panel
    from app.training.scores.detection import AveragePrecision

    scores, (height, width) = run.scores_of(AveragePrecision(names)), rows.images.shape[2:]
    shown: list = []
    for micro in run.evaluation(model, rows, collate, weights=rows.weights):
        output = model(**micro.inputs)
        size = height, width
        detected, truth = boxes_of(output, processor, size), truth_of(micro.inputs["labels"], size)
        scores.update(micro.weight, detected, truth, loss=output.loss)
        pictures = zip(micro.inputs["pixel_values"], truth, detected, strict=True)
        shown += [panel(*each, names) for each in list(pictures)[: PICTURES - len(shown)]]
    run.log_images({"eval/boxes": shown})
    results = scores.compute()
    del results["eval/samples"]
    return results


def main(config: Config) -> dict[str, float]:
    """Train the model and return its last scores."""
    from app.data.boxes.augment import BoxCollate, BoxDraw
    from app.tasks.detection.networks import too_many_boxes

    with Run(config) as run:
        with run.main_process_first():
            train_rows, eval_sets, names, processor, about = load_data(config, run.needs)
        run.say(about)
        run.keep_best("eval/map")
        collate, augment = BoxCollate.of(processor), BoxDraw(config.augment)
        plain = build_model(config, names, collate, train_rows, run.needs)
        if told := too_many_boxes(plain, train_rows.boxes.counts, "" if config.model else "--scratch.queries"):
            run.warn(f"warning: {told}")
        model, optimizer = run.prepare(plain, config.optim)
        for batch in run.batches(train_rows, collate, weights=train_rows.weights, augment=augment):
            for micro in batch.micros(model):
                run.backward(model(**micro.inputs).loss, micro)
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, model, eval_sets, collate, names, processor)
        return run.finish(model, processor, use=USE_IT)


if __name__ == "__main__":
    main(parse(Config))
