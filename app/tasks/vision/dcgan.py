"""A small DCGAN (Radford et al. 2016), with GroupNorm, whose results do not depend on the layout.

This file imports nothing of Samestep, because it is saved next to the weights: where Samestep is not installed,
`AutoModel.from_pretrained(..., trust_remote_code=True)` loads it.
"""

import itertools

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

STEM = 4
GROUPS = 8


class DCGANConfig(PreTrainedConfig):
    """The shape of a generator and its discriminator.

    Args:
        size: height and width of the images, in pixels: 4 times a power of two.
        channels: channels of the images.
        width: channels of the layers at full resolution, which double with each halving of the resolution.
        latent: numbers in the noise that an image is made of.
    """

    model_type = "samestep-dcgan"

    size: int = 16
    channels: int = 1
    width: int = 32
    latent: int = 64

    @property
    def widths(self) -> list[int]:
        """List the channels of the layers from full resolution down to 4 x 4."""
        halvings = (self.size // STEM).bit_length() - 1
        return [self.width * 2**i for i in range(halvings)]


class _Model(PreTrainedModel):
    config_class = DCGANConfig
    _no_split_modules = ["Up", "Down"]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class Up(nn.Module):
    """Double the resolution."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, before)
        self.convolution = nn.ConvTranspose2d(before, after, 4, stride=2, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.convolution(torch.relu(self.norm(hidden)))


class Down(nn.Module):
    """Halve the resolution."""

    def __init__(self, before: int, after: int, normalise: bool):
        super().__init__()
        self.convolution = nn.Conv2d(before, after, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(GROUPS, after) if normalise else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.leaky_relu(self.norm(self.convolution(hidden)), 0.2)


class Generator(_Model):
    """Make images from noise."""

    main_input_name = "latents"

    def __init__(self, config: DCGANConfig):
        super().__init__(config)
        widths = config.widths[::-1]
        self.stem = nn.Linear(config.latent, widths[0] * STEM**2)
        self.layers = nn.ModuleList(Up(*pair) for pair in zip(widths, [*widths[1:], config.channels], strict=True))
        self.post_init()

    def forward(self, latents: Tensor) -> Tensor:
        """Return images [samples, channels, size, size] between -1 and 1, for latents [samples, latent]."""
        hidden = self.stem(latents).reshape(len(latents), -1, STEM, STEM)
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.tanh(hidden)


class Discriminator(_Model):
    """Tell real images from generated ones."""

    main_input_name = "pixel_values"

    def __init__(self, config: DCGANConfig):
        super().__init__(config)
        widths = [config.channels, *config.widths]
        self.layers = nn.ModuleList(
            Down(before, after, normalise=i > 0) for i, (before, after) in enumerate(itertools.pairwise(widths))
        )
        self.head = nn.Linear(widths[-1] * STEM**2, 1)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return a logit for each image, [samples, 1]: above 0 for real."""
        hidden = pixel_values
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.flatten(1))


DCGANConfig.register_for_auto_class()
Generator.register_for_auto_class("AutoModel")
