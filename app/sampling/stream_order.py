"""The order of samples of data that are read by chunks: which row of which chunk sample t is, as a pure function of t.

A chunk is what one request reads, such as a row group of a parquet file. In an epoch, the chunks, in the epoch's keyed
order, make one line of rows. The line is cut into K lanes, one for each micro-batch of a full step (`lanes`), so a
chunk is read for one micro-batch only, unless the border of two lanes lies in it, whatever the number of machines.
Inside a lane, rows are permuted within windows of some chunks: what a lane holds in memory at a time. So a batch mixes
rows of about K x window chunks, and that product should be large next to the batch (`benchmarks/stream_mixing.py`).

Epochs of N rows follow each other as they do for mapped data (`permutation.stream`): sample t is of epoch t // N. If N
does not divide by the batch, the batch at the end of an epoch takes its last rows and the first ones of the next epoch.
So every row comes once an epoch, and only the last batch of a run can be short. Each lane makes this change by itself.

These values must never change: a resumed run depends on them for the samples that it sees next.
"""

import functools
from typing import NamedTuple

import numpy as np

from app.sampling.lanes import dealt, edges
from app.sampling.permutation import LARGEST, permute
from app.sampling.pieces import Pieces
from app.sampling.seeding import seed_of

# Places of a window that are permuted together: a call of `permute` costs more than its work on the few of one step.
BLOCK = 1 << 10
# Chunks that are put in order together, so that a line of a million is built without large temporary arrays.
ORDERED = 1 << 16


class Rows(NamedTuple):
    """Where samples are: int64 arrays of one shape."""

    chunks: np.ndarray
    rows: np.ndarray
    """Numbers of the rows in their chunks."""
    epochs: np.ndarray


class _Line(NamedTuple):
    """The rows of one epoch, one after another."""

    epoch: int
    order: np.ndarray
    """Chunks, in their order in the line: int32."""
    pieces: Pieces
    """The chunks in that order, of which a place in the line is a row."""


class StreamOrder:
    """The order of the rows of chunks, epoch after epoch.

    It holds 8 bytes a chunk, and 12 more for each of the two epochs that were asked for last.
    """

    def __init__(self, sizes: np.ndarray, lanes: int, window: int, seed: int):
        """Take the chunks.

        Args:
            sizes: rows of each chunk, integers [chunks]; a chunk may have none.
            lanes: the number of micro-batches of a full step.
            window: the number of chunks whose rows are permuted together.

        Raises:
            ValueError: there are no rows, more than 2**62, or more than 2**31 chunks; a size is below 0, or lanes or
                window below 1.
        """
        sizes = np.asarray(sizes)
        if sizes.ndim != 1 or sizes.dtype.kind not in "iu":
            raise TypeError(f"sizes are {sizes.dtype} of shape {sizes.shape}: they must be integers [chunks]")
        if lanes < 1 or window < 1:
            raise ValueError(f"lanes is {lanes} and window is {window}: both must be at least 1")
        rows = sizes.sum(dtype=np.float64)  # which cannot overflow; below the limit, int64 cannot either
        if not 1 <= rows <= LARGEST or sizes.min() < 0 or len(sizes) >= 2**31:
            raise ValueError(f"{rows:.0f} rows in {len(sizes)} chunks: an order needs 1 to 2**62, and no chunk below 0")
        self.sizes, self.rows = sizes.astype(np.int64, copy=False), int(sizes.sum(dtype=np.int64))
        self.lanes, self.window, self.seed = lanes, window, seed
        self._lines: tuple[_Line, ...] = ()

    def locate(self, samples: np.ndarray) -> Rows:
        """Return where samples of the run are; samples are integers of any shape, counted from 0 over all epochs.

        Raises:
            IndexError: a sample is below 0, or 2**62 or above.
        """
        samples = np.asarray(samples).astype(np.int64, casting="same_kind")
        if samples.size and not 0 <= samples.min() <= samples.max() < LARGEST:
            raise IndexError(f"samples {samples.min()} to {samples.max()} are not all in [0, 2**62)")
        flat = samples.reshape(-1)
        epochs = flat // self.rows
        chunks, rows = np.empty_like(flat), np.empty_like(flat)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chunks[here], rows[here] = self._locate_in(int(epoch), flat[here])
        return Rows(chunks.reshape(samples.shape), rows.reshape(samples.shape), epochs.reshape(samples.shape))

    def chunks_of(self, lane: int, epoch: int) -> np.ndarray:
        """Return the chunks that a lane reads in an epoch, in the order of reading, int64."""
        line, (begin, end) = self._line(epoch), self._borders(epoch)[lane : lane + 2]
        first, last = line.pieces.piece_of(np.array([begin, end - 1]))
        chunks = line.order[first : last + 1] if begin < end else line.order[:0]
        return chunks[self.sizes[chunks] > 0].astype(np.int64)

    def coming(self, samples: np.ndarray, end: int) -> np.ndarray:
        """Return the chunks of the windows that samples are in, and of the next ones in their lanes, int64.

        Args:
            end: the number of samples of the run: what only later ones need is left out.
        """
        chunks = [np.zeros(0, np.int64)]
        flat = np.asarray(samples, np.int64).reshape(-1)
        for lane in np.unique(flat % self.lanes).tolist():
            last = int(flat[flat % self.lanes == lane].max())
            epoch = last // self.rows
            line, (begin, close) = self._line(epoch), self._borders(epoch)[lane : lane + 2]
            place = begin + last // self.lanes - dealt(epoch * self.rows, lane, self.lanes)
            first, at, final = line.pieces.piece_of(np.array([begin, place, close - 1])).tolist()
            low = first + (at - first) // self.window * self.window
            chunks.append(line.order[low : min(low + 2 * self.window, final + 1)].astype(np.int64))
            if low + self.window > final and (epoch + 1) * self.rows < end:
                chunks.append(self.chunks_of(lane, epoch + 1)[: self.window])
        found = np.concatenate(chunks)
        return found[self.sizes[found] > 0]

    def _locate_in(self, epoch: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the chunks and the rows of samples of one epoch."""
        line, borders = self._line(epoch), self._borders(epoch)
        lane = samples % self.lanes
        first, end = borders[lane], borders[lane + 1]
        places = first + samples // self.lanes - dealt(epoch * self.rows, lane, self.lanes)
        # Windows are counted from the lane's first chunk, and end with the lane.
        pieces = line.pieces
        first_chunks = pieces.piece_of(first)
        low = first_chunks + (pieces.piece_of(places) - first_chunks) // self.window * self.window
        high = np.minimum(low + self.window, len(self.sizes))
        begins, ends = np.maximum(first, pieces.borders[low]), np.minimum(end, pieces.borders[high])
        places = self._permuted(epoch, places, begins, ends)
        chunks, rows = pieces.places_of(places)
        return line.order[chunks], rows

    def _permuted(self, epoch: int, places: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return other places for places in the line, each in its window, which goes from `begins` to `ends`."""
        blocks = (places - begins) // BLOCK
        names = begins + blocks * BLOCK
        by_name = np.argsort(names, kind="stable")
        groups = np.split(by_name, np.flatnonzero(np.diff(names[by_name])) + 1)
        permuted = np.empty_like(places)
        for group in groups:
            begin, end, block = (int(column[group[0]]) for column in (begins, ends, blocks))
            # No two windows of an epoch begin at one place, so that names the window.
            moved = _block(block, end - begin, seed_of(self.seed, begin), epoch)
            permuted[group] = begin + moved[places[group] - begin - block * BLOCK]
        return permuted

    def _borders(self, epoch: int) -> np.ndarray:
        """Return where each lane begins in the line of an epoch, and where the last one ends: int64 [lanes + 1]."""
        return edges((epoch + 1) * self.rows, self.lanes) - edges(epoch * self.rows, self.lanes)

    def _line(self, epoch: int) -> _Line:
        """Return the line of an epoch; the two that were used last are remembered, as a step may be of both."""
        for line in self._lines:
            if line.epoch == epoch:
                return line
        self._lines = self._lines[-1:]  # before the new one takes memory
        order, borders = np.empty(len(self.sizes), np.int32), np.zeros(len(self.sizes) + 1, np.int64)
        ends = borders[1:]
        seed = seed_of(self.seed)  # of one number, where the seed of a window is of two
        for start in range(0, len(order), ORDERED):
            part = slice(start, start + ORDERED)
            numbers = np.arange(start, min(start + ORDERED, len(order)))
            order[part] = permute(numbers, len(order), seed, epoch)
            ends[part] = self.sizes[order[part]]
        np.cumsum(ends, out=ends)
        line = _Line(epoch, order, Pieces(borders))
        self._lines = (*self._lines, line)
        return line


@functools.lru_cache(maxsize=256)
def _block(number: int, rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return where a block of places of a window goes."""
    places = np.arange(number * BLOCK, min((number + 1) * BLOCK, rows))
    permuted = permute(places, rows, seed, epoch)
    permuted.flags.writeable = False
    return permuted
