"""How far a run is, in the output of a notebook's cell: a bar, the last numbers, and the curve of the loss."""

import math
import time
from html import escape

_WIDTH, _HEIGHT = 480, 110  # of the curve, in pixels
_MOST = 400  # points of the curve
_SECONDS = 0.3  # between two updates of the output


class CellView:
    """An output of the cell that is replaced as the run goes on."""

    def __init__(self, step: int, steps: int):
        """Show a run of `steps` steps that begins after `step`."""
        from IPython.display import display

        self.step, self.steps = step, steps
        self._text = ""
        self._points: list[tuple[int, float]] = []
        self._every, self._logged = 1, 0  # which of the logged losses are points
        self._shown = time.monotonic()
        self._output = display(self._content(), raw=True, display_id=True)

    def advance(self) -> None:
        """Count one step."""
        self.step += 1
        self._update()

    def show(self, loss: float, text: str) -> None:
        """Add a logged loss to the curve, and show `text` next to the bar."""
        self._text = text
        self._logged += 1
        if math.isfinite(loss) and self._logged % self._every == 0:
            self._points.append((self.step, loss))
        if len(self._points) > _MOST:
            self._points, self._every = self._points[1::2], 2 * self._every
        self._update()

    def close(self) -> None:
        """Show the last state."""
        self._update(now=True)

    def _update(self, now: bool = False) -> None:
        if now or time.monotonic() - self._shown >= _SECONDS:
            self._shown = time.monotonic()
            self._output.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        """Return the output as a page shows it, and as text where there is no page."""
        about = f"step {self.step}/{self.steps}  {self._text}".rstrip()
        bar = f'<progress value="{self.step}" max="{self.steps}" style="width: {_WIDTH}px"></progress>'
        page = f'<div style="font-family: monospace">{bar}<br>{escape(about)}<br>{self._curve()}</div>'
        return {"text/html": page, "text/plain": about}

    def _curve(self) -> str:
        """Draw the losses as SVG, with the highest and the lowest value at the edge."""
        if len(self._points) < 2:
            return ""
        first, last = self._points[0][0], self._points[-1][0]
        low, high = min(value for _, value in self._points), max(value for _, value in self._points)
        across, up = _WIDTH / max(1, last - first), (_HEIGHT - 20) / ((high - low) or 1.0)
        path = " ".join(f"{(s - first) * across:.1f},{_HEIGHT - 10 - (v - low) * up:.1f}" for s, v in self._points)
        text = 'font-size="11" fill="currentColor"'
        return (
            f'<svg width="{_WIDTH + 70}" height="{_HEIGHT}">'
            f'<polyline points="{path}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>'
            f'<text x="{_WIDTH + 6}" y="14" {text}>{high:.4g}</text>'
            f'<text x="{_WIDTH + 6}" y="{_HEIGHT - 6}" {text}>{low:.4g}</text></svg>'
        )
