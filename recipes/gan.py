r"""Train a generative adversarial network, a small DCGAN: two models and two optimizers in one visible loop.

    accelerate launch recipes/gan.py
    accelerate launch --config_file accelerate_configs/ddp_cpu.yaml recipes/gan.py --run.dir runs/gan-ddp
    accelerate launch recipes/gan.py --data.path faces/ --data.size 64 \
        --color true --width 64
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app import EMAConfig, Needs, OptimConfig, Run, RunConfig, UserError, parse
from app.config import setting
from app.data.config import ImageData

if TYPE_CHECKING:
    from torch import Tensor, nn

    from app.data.images.labeled_images import Images
    from app.tasks.vision.dcgan import Discriminator, Generator

USE_IT = (
    "python -c 'import torch; from transformers import AutoModel; "
    """model = AutoModel.from_pretrained("{model}", trust_remote_code=True); """
    "print(model(torch.randn(16, model.config.latent)).shape)'"
)
SHOWN = 64


def adam() -> OptimConfig:
    """Return Adam with the betas of the DCGAN paper (Radford et al., 2015), without weight decay or clipping."""
    return OptimConfig(name="Adam", lr=5e-4, betas=(0.5, 0.999), weight_decay=0.0, clip=0.0)


@dataclass
class Config:
    """Train a generative adversarial network."""

    width: int = setting(32, at_least=1)
    """Channels at full resolution, a multiple of 8. Each halving of the resolution doubles them."""
    latent: int = setting(64, at_least=0)
    """Length of the noise vector that the generator turns into an image."""
    color: bool = False
    """Generate color images; false: gray ones."""
    samples: int = setting(2000, at_least=0)
    """Images that the generator makes in each evaluation."""
    data: ImageData = field(default_factory=lambda: ImageData(size=16))
    optim: OptimConfig = field(default_factory=adam)
    """Optimizer of the generator."""
    optim_d: OptimConfig = field(default_factory=adam)
    """Optimizer of the discriminator."""
    ema: EMAConfig = field(default_factory=EMAConfig)
    run: RunConfig = field(
        default_factory=lambda: RunConfig(epochs=40, micro_batch=32, eval_every=250, best="-eval/frechet")
    )


def load_data(config: Config, needs: Needs = Needs()) -> "tuple[Images, Images]":
    """Return the training images and the held-out images."""
    from app.data.images import labeled_images
    from app.data.loading import load_tables

    size, tables = config.data.size, load_tables(config.data, needs=needs)
    if size < 8 or size & (size - 1):
        raise UserError(f"--data.size {size}: must be a power of two, 8 or more")
    mode = "RGB" if config.color else "L"
    columns = [
        labeled_images.ImageColumn(table, config.data.image, mode) for table in (tables.train, tables.evaluation)
    ]
    processor = labeled_images.own_processor(columns[0], size)
    real, held_out = (labeled_images.load_images(column, processor, config.data.cache_gb) for column in columns)
    return real, held_out


def build_models(config: Config) -> "tuple[Generator, Discriminator]":
    """Build a generator and a discriminator."""
    from app.tasks.vision.dcgan import DCGANConfig, Discriminator, Generator

    if config.width < 8 or config.width % 8:
        raise UserError(f"--width {config.width}: must be a multiple of 8")
    channels = 3 if config.color else 1
    shape = DCGANConfig(size=config.data.size, channels=channels, width=config.width, latent=config.latent)
    return Generator(shape), Discriminator(shape)


class Latents:
    """Noise vectors for evaluations, the same in each one."""

    def __init__(self, count: int, length: int):
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, sample: int) -> "Tensor":
        import torch

        from app.sampling.seeding import sample_generator

        return torch.from_numpy(sample_generator(0, 0, sample).standard_normal(self.length).astype("float32"))


def describe(real: "Images", held_out: "Images") -> "tuple[tuple[Tensor, Tensor], str]":
    """Return mean and covariance of the real images, and a line that describes them.

    The line has the distance of the held-out images, for comparison with scores. Reads up to 10,000 images of each.
    """
    import torch

    from app.training.scores.frechet import PixelFrechet, moments_of

    moments = moments_of(torch.from_numpy(pixels) for pixels in real.some(10_000))
    score = PixelFrechet(moments)
    for pixels in held_out.some(10_000):
        score.update(torch.from_numpy(pixels))
    return moments, f"{len(real):,} images of {real.shape[2]} x {real.shape[3]}; {len(held_out):,} held out are at " + (
        f"{score.alone()['frechet']:.4f} (eval/frechet; 0 is the same)"
    )


def evaluate(run: Run, generator: "nn.Module", latents: Latents, moments: "tuple[Tensor, Tensor]") -> dict[str, float]:
    """Compare generated images with real ones, and draw some of them."""
    import torch

    from app.tasks.vision.pictures import sheet
    from app.training.scores.frechet import PixelFrechet

    scores, shown = run.scores_of(PixelFrechet(moments)), list[torch.Tensor]()
    for micro in run.evaluation(generator, latents, torch.stack):
        made = ((generator(micro.inputs) + 1) * 127.5).round().byte()
        scores.update(micro.weight, made)
        shown += list(made.cpu()) if len(shown) < SHOWN else []
    pixels = torch.stack(shown[:SHOWN]).permute(0, 2, 3, 1).numpy()
    run.log_images({"eval/samples": [sheet(pixels, magnify=2)]})
    return scores.compute()


def main(config: Config) -> dict[str, float]:
    """Train both models and return the last scores."""
    import torch
    from torch.nn.functional import softplus

    from app.data.images.augment import ImageCollate

    with Run(config) as run:
        with run.main_process_first():
            real, held_out = load_data(config, run.needs)
        generator, discriminator = build_models(config)
        latents, channels = Latents(config.samples, config.latent), generator.config.channels
        moments, about = describe(real, held_out)
        run.say(about)
        generator, optimizer = run.prepare(generator, config.optim)
        discriminator, optimizer_d = run.prepare(discriminator, config.optim_d, averaged=False)
        collate = ImageCollate([0.5] * channels, [0.5] * channels, 1 / 255)
        for batch in run.batches(real, collate):
            for micro in batch.micros(discriminator):
                images = micro.inputs["pixel_values"]
                with torch.no_grad():
                    made = generator(torch.randn(len(images), config.latent, device=images.device))
                true, false = discriminator(torch.cat([images, made])).chunk(2)
                run.backward((softplus(-true) + softplus(false)).mean(), micro, "loss/discriminator")
            run.step(optimizer_d)
            for micro in batch.micros(generator, frozen=[discriminator]):
                images = micro.inputs["pixel_values"]
                made = generator(torch.randn(len(images), config.latent, device=images.device))
                run.backward(softplus(-discriminator(made)).mean(), micro, "loss/generator")
            run.step(optimizer)
            if run.due(config.run.eval_every):
                run.evaluate(evaluate, generator, latents, moments)
        return run.finish(generator, use=USE_IT)


if __name__ == "__main__":
    main(parse(Config))
