"""Detectors: their scores are pycocotools', their losses count boxes over the global batch, and others can use them."""

import contextlib
import io
import re

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from support.launching import ROOT
from transformers import ConditionalDetrConfig, DetrConfig, DetrForObjectDetection, ResNetConfig, pipeline

from app.data.boxes.detections import own_processor
from app.errors import UserError
from app.tasks.detection.dense import DenseDetectorConfig
from app.tasks.detection.losses import SetLoss, dense_loss, generalised_iou
from app.tasks.detection.networks import new_detector, too_many_boxes, with_loss
from app.tasks.detection.pictures import LINE, panel
from app.tasks.from_scratch import DetectorScratch
from app.tasks.segmentation.panels import colours
from app.training.scores import detection as average_precision
from app.training.scores.detection import AveragePrecision
from laws.many import load

NAMES = ["cat", "dog", "never"]


def scattered(random, count, spread=0.0, near=None):
    """Boxes in an image of 100 x 100: at random places, or near to others."""
    if near is not None:
        moved = near + random.normal(0, spread, near.shape)
        return np.concatenate([moved[:, :2], np.maximum(moved[:, 2:], moved[:, :2] + 1)], axis=1)
    low = random.uniform(0, 60, (count, 2))
    return np.concatenate([low, low + random.uniform(5, 40, (count, 2))], axis=1)


def some_images(random, count):
    """Truth and detections of images; some scores and boxes are equal, and some images have neither."""
    images = []
    for index in range(count):
        real = scattered(random, index % 5)
        classes = random.integers(0, 2, len(real))
        found = np.concatenate([scattered(random, 3 * (index % 3)), scattered(random, 0, 2.0, real), real[:1]])
        labels = np.concatenate([random.integers(0, 3, 3 * (index % 3)), classes, classes[:1]])
        scores = random.integers(1, 12, len(found)) / 12
        truth = {"boxes": torch.tensor(real).reshape(-1, 4), "labels": torch.tensor(classes)}
        boxes = {"boxes": torch.tensor(found).reshape(-1, 4), "labels": torch.tensor(labels)}
        images.append((truth, {**boxes, "scores": torch.tensor(scores)}))
    return images


def coco_scores(images):
    """Return pycocotools' mean average precision, and that at an IoU of 0.5."""

    def sized(boxes):
        return [[left, top, right - left, bottom - top] for left, top, right, bottom in boxes.tolist()]

    truth, found = [], []
    for image, (real, own) in enumerate(images):
        for box, label in zip(sized(real["boxes"]), real["labels"].tolist(), strict=True):
            kinds = {"id": len(truth) + 1, "image_id": image, "category_id": label, "iscrowd": 0}
            truth.append({**kinds, "bbox": box, "area": box[2] * box[3]})
        for box, label, score in zip(sized(own["boxes"]), own["labels"].tolist(), own["scores"].tolist(), strict=True):
            found.append({"image_id": image, "category_id": label, "bbox": box, "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        real = COCO()
        real.dataset = {
            "images": [{"id": image} for image in range(len(images))],
            "annotations": truth,
            "categories": [{"id": index, "name": name} for index, name in enumerate(NAMES)],
        }
        real.createIndex()
        judge = COCOeval(real, real.loadRes(found), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return judge.stats[0], judge.stats[1]


def metric_of(images):
    metric = AveragePrecision(NAMES)
    for truth, found in images:
        metric.update([found], [truth])
    return metric


@pytest.mark.parametrize("seed", range(4))
def test_average_precision_is_that_of_pycocotools(seed):
    images = some_images(np.random.default_rng(seed), 40)
    found = metric_of(images).alone()
    assert (found["map"], found["map50"]) == pytest.approx(coco_scores(images), abs=1e-12)
    assert found["map"] == pytest.approx((found["map_cat"] + found["map_dog"]) / 2) and "map_never" not in found
    assert found["images"] == 40 and found["boxes"] == sum(len(truth["boxes"]) for truth, _ in images)


def test_average_precision_is_the_same_on_three_processes(monkeypatch):
    images = some_images(np.random.default_rng(7), 40)
    parts = [metric_of(images[start:end]) for start, end in ((0, 13), (13, 39), (39, 40))]
    sent = []
    monkeypatch.setattr(average_precision.collectives, "gather", lambda own: sent.append(own) or [own])
    for part in parts:
        part.alone()
    monkeypatch.setattr(average_precision.collectives, "gather", lambda own: sent)
    parts[1].total = sum(part.state for part in parts).tolist()
    assert parts[1].scores() == metric_of_all(images, monkeypatch)


def metric_of_all(images, monkeypatch):
    monkeypatch.setattr(average_precision.collectives, "gather", lambda own: [own])
    return metric_of(images).alone()


def test_nothing_found_and_nothing_there():
    truth = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    nothing = {**truth, "scores": torch.zeros(0)}
    assert metric_of([(truth, nothing)]).alone() == {"images": 1, "boxes": 0}
    one = {"boxes": torch.tensor([[0.0, 0, 9, 9]]), "labels": torch.tensor([1])}
    assert metric_of([(one, nothing)]).alone()["map"] == 0


def some_labels(counts, classes=2, seed=0):
    random = np.random.default_rng(seed)
    labels = []
    for count in counts:
        sides = random.uniform(0.1, 0.4, (count, 2))
        boxes = np.concatenate([random.uniform(0.2, 0.8, (count, 2)), sides], axis=1)
        labels.append(
            {
                "class_labels": torch.tensor(random.integers(0, classes, count), dtype=torch.int64),
                "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
                "weight": torch.tensor(float(max(count, 1))),
            }
        )
    return labels


def in_parts(loss, images, labels, cuts):
    """Add up the losses of micro-batches, each by its share of the weight, as `run.backward` does."""
    whole, weights = loss(images, labels), [float(label["weight"]) for label in labels]
    parts = [loss(images[slice(*cut)], labels[slice(*cut)]) * sum(weights[slice(*cut)]) / sum(weights) for cut in cuts]
    return whole, sum(parts)


@pytest.mark.parametrize("network", ["dense", "detr"])
def test_a_loss_does_not_depend_on_how_the_batch_is_cut(network):
    """Images with many boxes, one and none."""
    torch.manual_seed(0)
    model = new_detector(DetectorScratch(network=network, width=8, queries=9), NAMES, 3).eval()
    labels = some_labels([3, 1, 0, 6], classes=3)
    whole, added = in_parts(
        lambda x, y: model(pixel_values=x, labels=y).loss, torch.rand(4, 3, 64, 64), labels, [(0, 1), (1, 4)]
    )
    assert torch.allclose(whole, added, rtol=1e-5) and whole > 0


def test_a_new_detr_begins_with_gradients_of_ordinary_size():
    """Zeros at the start of a decoder made them 200,000, so that clipping left nothing of most."""
    torch.manual_seed(0)
    model = new_detector(DetectorScratch(network="detr", width=8, queries=9), NAMES, 3)
    model(pixel_values=torch.rand(2, 3, 64, 64), labels=some_labels([2, 3])).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert torch.nn.utils.get_total_norm(gradients) < 100


def small_detr(kind, **more):
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"])
    size = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 16))
    }
    plain = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    return kind(
        backbone_config=backbone, d_model=16, num_queries=9, num_labels=2, auxiliary_loss=True, **plain, **size, **more
    )


@pytest.mark.parametrize("kind", [DetrConfig, ConditionalDetrConfig])
def test_the_loss_is_transformers_own_on_one_process(kind):
    """Of images with equally many boxes: transformers takes softmax's mean over the queries of all images."""
    from transformers import AutoModelForObjectDetection

    torch.manual_seed(0)
    model = AutoModelForObjectDetection.from_config(small_detr(kind)).eval()
    images, labels = torch.rand(2, 3, 64, 64), some_labels([3, 3])
    own = model(pixel_values=images, labels=labels).loss
    ours = with_loss(model, "--model m")(pixel_values=images, labels=labels).loss
    assert isinstance(model.loss_function, SetLoss) and torch.allclose(own, ours, rtol=1e-5)


def test_a_loss_of_another_kind_is_refused():
    model = DetrForObjectDetection(small_detr(DetrConfig))
    model.loss_type = "RTDetrForObjectDetection"
    with pytest.raises(UserError, match="counts boxes by micro-batch"):
        with_loss(model, "--model m")


def test_the_least_dense_loss_is_that_of_the_truth():
    """Peaks and sides as the labels say, against the same a place away, and smaller."""
    labels = [
        {
            "class_labels": torch.tensor([1]),
            "boxes": torch.tensor([[0.5625, 0.5625, 0.5, 0.5]]),
            "weight": torch.tensor(1.0),
        }
    ]
    heat, corners = torch.full((1, 2, 8, 8), -9.0), torch.zeros(1, 4, 8, 8)
    heat[0, 1, 4, 4] = 9.0
    corners[0] = torch.tensor([2.5, 2.5, 6.5, 6.5])[:, None, None]
    best = dense_loss(heat, corners, labels)
    assert best < 1e-3
    assert dense_loss(heat.roll(1, -1), corners, labels) > 1 and dense_loss(heat, corners + 1, labels) > best + 0.5
    assert generalised_iou(corners[0, :, 4, 4], corners[0, :, 4, 4]) == 1


@pytest.mark.parametrize(("network", "queries", "told"), [("detr", 2, True), ("detr", 7, False), ("dense", 2, False)])
def test_more_boxes_than_queries_are_told(network, queries, told):
    model = new_detector(DetectorScratch(network=network, width=8, queries=queries), NAMES, 3)
    said = too_many_boxes(model, np.array([0, 2, 7, 3]), "--scratch.queries")
    words = ["2 of 4 training images have more boxes, up to 7, than the 2 that", "give a larger --scratch.queries"]
    assert all(word in said for word in words) if told else not said


@pytest.mark.parametrize("box", [[0, 0, 64, 64], [60, 0, 64, 64], [0, 0, 4, 10], [50, 62, 64, 64], [-9, -9, 90, 90]])
@pytest.mark.parametrize("names", [["cat"], ["cat", "dog", "bird"]])
def test_names_of_boxes_are_drawn_inside_the_picture(box, names):
    """On their class's colour, which is not white."""
    labels = torch.tensor([len(names) - 1])
    image = torch.linspace(0, 1, 64).expand(3, 64, 64)
    truth = {"boxes": torch.tensor([box], dtype=torch.float32), "labels": labels}
    nothing = {"boxes": torch.zeros(0, 4), "labels": labels[:0], "scores": torch.zeros(0)}
    drawn, plain = (panel(image, each, nothing, names)[:, :768].astype(int) for each in (truth, nothing))
    colour = colours(len(names) + 2)[1] if len(names) == 1 else colours(len(names) + 1)[-1]
    own = np.lib.stride_tricks.sliding_window_view((drawn == colour).all(-1) & (drawn != plain).any(-1), (LINE, 20))
    assert own.mean((2, 3)).max() > 0.5 and len(set(colour.tolist())) > 1


@pytest.mark.parametrize("side", [64, 96, 320, 640])
def test_boxes_are_drawn_thin_on_pictures_of_twice_the_size(side):
    """Twice what fits into a column, and twice an image that is larger than that."""
    labels = torch.tensor([0])
    truth = {"boxes": torch.tensor([[side / 4, side / 4, side / 2, side / 2]]), "labels": labels}
    nothing = {"boxes": torch.zeros(0, 4), "labels": labels[:0], "scores": torch.zeros(0)}
    image = torch.linspace(0, 1, side).expand(3, side, side)
    drawn, plain = (panel(image, each, nothing, NAMES).astype(int) for each in (truth, nothing))
    assert drawn.shape[0] == 2 * max(384 // side, 1) * side >= 640
    middle = (drawn != plain).any(-1)[drawn.shape[0] * 3 // 8]
    assert middle.sum() == 2  # the left and the right line, of a pixel each


def test_a_saved_detector_works_in_a_pipeline(tmp_path, monkeypatch):
    """By the file that is saved next to the weights; and no list of other models is printed."""
    from PIL import Image
    from transformers.models.auto.modeling_auto import MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES as KNOWN
    from transformers.pipelines import base

    said = []
    monkeypatch.setattr(base.logger, "error", said.append)
    model = new_detector(DetectorScratch(width=8), NAMES, 3)
    torch.nn.init.constant_(model.heat.bias, 1.0)

    class Column:
        def size(self, row):
            return 60, 40

    for part in (model, own_processor(Column(), 0)):
        part.save_pretrained(tmp_path / "model")
    monkeypatch.delitem(KNOWN, DenseDetectorConfig.model_type, raising=False)
    load(tmp_path / "model" / "dense.py")  # as the pipeline does, unless another test has made the class known
    detect = pipeline("object-detection", str(tmp_path / "model"), trust_remote_code=True)
    found = detect(Image.new("RGB", (60, 40)), threshold=0.5)
    assert detect.image_processor.size["height"] == 64 and (tmp_path / "model" / "dense.py").exists()
    assert found and {each["label"] for each in found} <= set(NAMES) and not said
    assert all(0 <= each["box"]["xmin"] <= each["box"]["xmax"] <= 60 for each in found)


def test_the_docs_use_it_as_the_recipe_says():
    command = load(ROOT / "recipes/det.py").USE_IT.format(model="runs/det/model")
    assert "threshold=" in command and command in re.sub(r"\s+", " ", (ROOT / "docs/detection.md").read_text())
