"""Train MONAI's U-Net as its users do, without this project, as the peer of recipes/seg.py.

    python benchmarks/peers/monai_seg.py --train data/train --held-out data/val

Each folder has the subfolders image and label, with the same file names. Network, patches, augmentation, optimizer,
learning rate and number of steps are those of `recipes/seg.py --data.path data` with the same flags.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from monai import transforms as mt
from monai.data import CacheDataset, DataLoader
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.utils import set_determinism

KEYS = ("image", "label")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--patch", type=int, default=64)
    parser.add_argument("--patches-per-image", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="patches of a step; a multiple of --patches-per-image")
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--warmup", type=float, default=0.05)
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def dataset(folder: Path, changes: list) -> CacheDataset:
    files = [{key: str(folder / key / file.name) for key in KEYS} for file in sorted((folder / "image").iterdir())]
    reading = [
        mt.LoadImaged(KEYS, ensure_channel_first=True, image_only=True),
        mt.NormalizeIntensityd("image", channel_wise=True),
        mt.Lambdad("label", lambda label: (label > 0).long()),
        mt.ToTensord(KEYS, track_meta=False),
    ]
    return CacheDataset(files, mt.Compose(reading + changes), progress=False)


def augmentation(patch: int, each: int) -> list:
    return [
        mt.RandSpatialCropSamplesd(KEYS, [patch] * 2, each, random_size=False),
        mt.RandFlipd(KEYS, 0.5, 0),
        mt.RandFlipd(KEYS, 0.5, 1),
        mt.RandRotate90d(KEYS, 0.75, 3),
        mt.RandScaleIntensityd("image", 0.1, 1.0),
        mt.RandShiftIntensityd("image", 0.1, prob=1.0),
    ]


def rate(step: int, asked: argparse.Namespace) -> float:
    """Warm up, then follow a cosine to 0."""
    warmup = asked.warmup * asked.steps
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (asked.steps - warmup)))


def steps(model, loader: DataLoader, loss_of, optimizer, rates, count: int) -> Iterator[torch.Tensor]:
    """Train; yield the loss after each step."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
    done = 0
    while done < count:
        for batch in loader:
            loss = loss_of(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            yield loss
            done += 1
            if done == count:
                break


def train(job, gate) -> None:
    """Train a benchmark's model and images with MONAI's own patches, augmentation, loader and loss."""
    patches = job.rows.rows
    images = [{"image": case["image"], "label": case["mask"]} for case in patches.cases]
    changes = mt.Compose([mt.ToTensord(KEYS, track_meta=False), *augmentation(patches.patch[0], patches.each)])
    cached = CacheDataset(images, changes, progress=False)
    size = job.run.global_batch // patches.each
    loader = DataLoader(cached, batch_size=size, shuffle=True, drop_last=True)
    loss_of = DiceCELoss(to_onehot_y=True, softmax=True)
    gate.begin()
    for _ in steps(job.model, loader, loss_of, job.optimizer(), lambda step: job.rate(step) / job.optim.lr, job.steps):
        gate(size * patches.each)


def score(model: UNet, loader: DataLoader, asked: argparse.Namespace) -> np.ndarray:
    """Return the Dice of each class, as the mean over images."""
    metric = DiceMetric(reduction="mean_batch", num_classes=2, include_background=True)
    model.eval()
    with torch.no_grad():
        for batch in loader:
            logits = sliding_window_inference(batch["image"], [asked.patch] * 2, 8, model, 0.25, mode="gaussian")
            metric(logits.argmax(1, keepdim=True), batch["label"])
    return metric.aggregate().numpy()


def main() -> None:
    asked = options()
    torch.set_num_threads(asked.threads)
    set_determinism(asked.seed)
    images = asked.batch // asked.patches_per_image
    changes = augmentation(asked.patch, asked.patches_per_image)
    train = DataLoader(dataset(asked.train, changes), batch_size=images, shuffle=True, drop_last=True)
    held_out = DataLoader(dataset(asked.held_out, []), batch_size=1)
    levels = len(asked.channels)
    model = UNet(2, 1, 2, asked.channels, (2,) * (levels - 1), num_res_units=1)
    loss_of = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.AdamW(model.parameters(), asked.lr, weight_decay=0.01)
    started = time.perf_counter()
    going = steps(model, train, loss_of, optimizer, lambda step: rate(step, asked), asked.steps)
    for done, loss in enumerate(going, 1):
        if done % len(train) == 0 or done == asked.steps:
            print(f"step {done}  loss {loss.item():.4f}", flush=True)
    trained = time.perf_counter() - started
    dice = score(model, held_out, asked)
    print(f"{asked.steps} steps in {trained:.1f} s, {asked.steps * asked.batch / trained:.1f} patches/s")
    print(f"held out: Dice of class 0 {dice[0]:.4f}, of class 1 {dice[1]:.4f}, mean {dice.mean():.4f}")


if __name__ == "__main__":
    main()
