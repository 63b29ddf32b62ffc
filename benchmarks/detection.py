"""Compare recipes/det.py with transformers' way to train a detector: held-out loss and mAP over seeds, and speed.

    python -m benchmarks.detection [--seeds 0 1 2] [--out FILE.json] [-- FLAGS of recipes/det.py]

`samestep` and `trainer` train the same Conditional DETR from scratch, with the same weights at the start, on the same
images, with the same batch, number of steps, learning rates and clipping, in fp32, and without augmentation. The other
one is what transformers' example run_object_detection does, written anew: images and boxes that the image processor
prepares when they are asked for, Trainer in its own order, and the model's own loss. `dense` is the recipe's default
network with as many steps. All saved models are judged by one function. Each training is a process of its own; they
alternate, and who is first changes with the seed. Speed is samples a second of the steps alone, by processor time.
"""

from typing import Any

from benchmarks.seeds import Watch, compare, recipe_run, timed, trainer_settings

FLAGS = "--run.epochs 2 --run.global-batch 16 --run.micro-batch 16"
PLAIN = "--augment.shift 0 --augment.zoom 0 --augment.colour 0"


def samestep(config: Any, folder: str) -> dict[str, float]:
    """Train the DETR with the recipe."""
    from recipes import det

    config.scratch.network = "detr"
    return recipe_run(det, config, folder) | judged(config, folder)


def dense(config: Any, folder: str) -> dict[str, float]:
    """Train the recipe's own network."""
    from recipes import det

    config.scratch.network = "dense"
    return recipe_run(det, config, folder) | judged(config, folder)


def trainer(config: Any, folder: str) -> dict[str, float]:
    """Train as run_object_detection does."""
    import torch
    from transformers import ConditionalDetrForObjectDetection, Trainer, TrainingArguments

    from app.config import chosen
    from app.data.boxes import detections
    from app.data.boxes.augment import BoxCollate
    from app.sampling.seeding import seed_all
    from recipes import det

    config.scratch.network = "detr"
    config, _ = chosen(config)
    rows, _, names, processor, _ = det.load_data(config)
    table = detections.load_boxes(config.data)[0].train

    def encode(batch):
        marks = []
        for number, (boxes, classes) in enumerate(zip(batch["boxes"], batch["classes"], strict=True)):
            sizes = [(left, top, right - left, bottom - top) for left, top, right, bottom in boxes]
            objects = [
                {"image_id": number, "category_id": kind, "iscrowd": 0, "area": size[2] * size[3], "bbox": size}
                for kind, size in zip(classes, sizes, strict=True)
            ]
            marks.append({"image_id": number, "annotations": objects})
        pictures = [image.convert("RGB") for image in batch["image"]]
        inputs = processor(images=pictures, annotations=marks, return_tensors="pt")
        return {name: inputs[name] for name in ("pixel_values", "labels")}

    def collate(rows):
        return {
            "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
            "labels": [dict(row["labels"]) for row in rows],
        }

    seed_all(config.run.seed)
    ours = det.build_model(config, names, BoxCollate.of(processor), rows)
    model = ConditionalDetrForObjectDetection(ours.config)
    model.load_state_dict(ours.state_dict())
    watch, steps = Watch(), -(-int(len(table) * config.run.epochs) // config.run.global_batch)
    how = Trainer(
        model=model, args=TrainingArguments(**trainer_settings(config, steps, folder), remove_unused_columns=False),
        train_dataset=table.with_transform(encode), data_collator=collate, processing_class=processor,
        callbacks=[timed(watch)],
    )  # fmt: skip
    how.train()
    how.save_model(f"{folder}/model")
    return watch.speeds(steps * config.run.global_batch) | judged(config, folder)


def judged(config: Any, folder: str) -> dict[str, float]:
    """Score a saved detector on the held-out images: the recipe's loss per box, and COCO's mean average precision."""
    import torch

    from app.config import chosen
    from app.data.boxes.augment import BoxCollate
    from app.tasks.detection.networks import boxes_of, load_detector, truth_of
    from app.training.scores.detection import AveragePrecision
    from recipes import det

    _, sets, names, processor, _ = det.load_data(chosen(config)[0])
    model, collate, rows = load_detector(f"{folder}/model", names).eval(), BoxCollate.of(processor), sets[""]
    scores, losses, size = AveragePrecision(names), [], rows.images.shape[2:]
    for first in range(0, len(rows), 50):
        inputs = collate(rows.__getitems__(range(first, min(first + 50, len(rows)))))
        with torch.no_grad():
            output = model(**inputs)
        losses.append(output.loss.item() * rows.weights[first : first + 50].sum())
        scores.update(boxes_of(output, processor, size), truth_of(inputs["labels"], size))
    score_by_name = scores.alone()
    return {"loss": sum(losses) / rows.weights.sum(), "map": score_by_name["map"], "map50": score_by_name["map50"]}


if __name__ == "__main__":
    from recipes import det

    contestants = {"samestep": samestep, "trainer": trainer, "dense": dense}
    compare("benchmarks.detection", __doc__, det, contestants, f"{FLAGS} {PLAIN}")
