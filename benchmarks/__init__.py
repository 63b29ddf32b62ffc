"""Comparisons with what people use, side by side on one machine."""

import app  # noqa: F401 (before torch: it settles how long waiting threads spin)
