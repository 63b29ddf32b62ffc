"""builtin:grains: synthetic polycrystals, in which a model finds the boundaries between the grains.

They stand for micrographs of metals: Voronoi cells with wavy walls, each cell with its own grey, the walls darker but
faint in places, and noise. A volume has the same bits on every machine, because it is computed with whole numbers and
with operations whose rounding IEEE 754 fixes.
"""

import functools

import numpy as np

from app.sampling.seeding import seed_of

# Part of each volume's seed: raise it when they change.
VERSION = 1
NAMES = ("grain", "boundary")
# For each number of dimensions: how many images there are, their sides in voxels, and the grains of each.
SIZES = {2: (48, (128, 128), 24), 3: (12, (48, 48, 48), 12)}
UNIT = 16  # positions are counted in sixteenths of a voxel
HALF_WALL = 1.5  # voxels


@functools.cache
def grains(dims: int) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """List names, images and masks (1: boundary), both uint8 [*sides]; computed in seconds, once in a process."""
    return [(f"grains-{index:02}", *grain(index, dims)) for index in range(SIZES[dims][0])]


def grain(index: int, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Make image and mask number `index`."""
    _, sides, cells = SIZES[dims]
    generator = np.random.Generator(np.random.Philox(key=seed_of(VERSION, dims, index)))
    seeds = generator.integers(0, [UNIT * side for side in sides], size=(cells, dims))
    greys = generator.integers(120, 200, cells)
    places = [axis * UNIT + _smooth(generator, sides, 9, 3 * UNIT) for axis in np.indices(sides)]
    nearest, wall = _cells(places, seeds)

    depth = 60 + _smooth(generator, sides, 13, 40)
    shade = np.clip((2 * HALF_WALL - wall) * UNIT, 0, HALF_WALL * UNIT).astype(np.int64)
    image = greys[nearest] - depth * shade // int(HALF_WALL * UNIT)
    image += _smooth(generator, sides, 3, 30) + generator.integers(-20, 21, sides)
    return np.clip(image, 0, 255).astype(np.uint8), (wall < HALF_WALL).astype(np.uint8)


def _cells(places: list[np.ndarray], seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each place the number of its cell, and its distance in voxels to the nearest wall."""
    squares = np.stack([sum((p - c) ** 2 for p, c in zip(places, seed, strict=True)) for seed in seeds])
    first = squares.argmin(axis=0)[None]
    near = np.take_along_axis(squares, first, axis=0)
    np.put_along_axis(squares, first, np.iinfo(np.int64).max, axis=0)
    second = squares.argmin(axis=0)[None]
    far = np.take_along_axis(squares, second, axis=0)
    apart = np.sqrt(((seeds[first] - seeds[second]) ** 2).sum(axis=-1))
    return first[0], ((far - near) / (2 * UNIT * np.maximum(apart, 1)))[0]


def _smooth(generator: np.random.Generator, sides: tuple[int, ...], width: int, largest: int) -> np.ndarray:
    """Draw a field of whole numbers that varies over about `width` voxels, mostly within +-largest."""
    field = generator.integers(-(2**24), 2**24 + 1, sides)
    for axis, side in enumerate(sides):
        for _ in range(2):  # the mean over a window that wraps around the edge
            sums = np.cumsum(np.concatenate([field, np.take(field, range(width), axis)], axis), axis)
            field = (np.take(sums, range(width, width + side), axis) - np.take(sums, range(side), axis)) // width
    deviation = int(np.sqrt(int((field**2).sum()) // field.size))
    return np.clip(field * largest // (2 * max(deviation, 1)), -2 * largest, 2 * largest)
