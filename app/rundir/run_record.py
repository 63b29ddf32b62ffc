"""run.json as it is read: fields of known types, whatever the file holds."""

from dataclasses import dataclass
from typing import Any

from app.rundir.foreign import number, plain, section, text, whole


@dataclass(frozen=True)
class Launch:
    """One launch of a run: after which step it began or resumed, and its layout in a few words."""

    step: int
    layout: str

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Launch":
        """Read the fields of a launch."""
        return cls(whole(fields.get("step")) or 0, _text(fields, "layout"))


@dataclass(frozen=True)
class RunRecord:
    """What run.json says of a run, in printable texts; a field that is missing or of another type is empty."""

    status: str
    step: int
    steps: int | None
    """Of the whole run."""
    recipe: str
    error: str
    launches: list[Launch]
    segments: dict[int, dict[str, tuple[str, str]]]
    """By the step after which they were changed: settings by name, as they were and as they became."""
    versions: dict[str, str]
    commit: str
    recipe_folder: str
    """As it is in the file: it is compared, and never shown."""

    @classmethod
    def of(cls, raw: dict[str, Any]) -> "RunRecord":
        """Read the fields of run.json.

        Raises:
            ValueError: there are too many values, or they are too deep.
        """
        fields = plain(raw)
        folder = raw.get("recipe_folder")
        return cls(
            status=_text(fields, "status") or "?",
            step=whole(fields.get("step")) or 0,
            steps=whole(fields.get("steps")),
            recipe=_text(fields, "recipe"),
            error=text(raw.get("error") or "", lines=True),
            launches=[Launch.of(each) for each in _dictionaries(_launches(fields))],
            segments=dict(map(_segment, segments_of(fields))),
            versions={name: text(version) for name, version in section(fields, "versions").items()},
            commit=_text(fields, "commit"),
            recipe_folder=folder if isinstance(folder, str) else "",
        )

    @property
    def length(self) -> str:
        """Return the number of steps of the whole run as text; a question mark where it is not known."""
        return "?" if self.steps is None else str(self.steps)


def launches_of(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """List the launches in the fields of run.json that say after which step they began."""
    return _with_steps(_launches(fields))


def segments_of(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """List the changes of settings in the fields of run.json that say after which step they were made."""
    return _with_steps(fields.get("segments"))


def _launches(fields: dict[str, Any]) -> Any:
    return fields.get("launches")


def _with_steps(found: Any) -> list[dict[str, Any]]:
    return [each for each in _dictionaries(found) if whole(each.get("step")) is not None]


def _dictionaries(found: Any) -> list[dict[str, Any]]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _segment(segment: dict[str, Any]) -> tuple[int, dict[str, tuple[str, str]]]:
    changed = section(segment, "changed")
    pairs = {name: pair for name, pair in changed.items() if isinstance(pair, list) and len(pair) == 2}
    return segment["step"], {name: (text(pair[0]), text(pair[1])) for name, pair in pairs.items()}


def _text(fields: dict[str, Any], name: str) -> str:
    found = fields.get(name)
    return found if isinstance(found, str) else ""


def line_of(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a line of metrics.jsonl has to show: its step, numbers, None for one that was not finite, and texts.

    None for a line whose step no run can have.
    """
    step = whole(fields.get("step"))
    if step is None:
        return None
    kept = {text(name): value for name, value in fields.items() if isinstance(value, int | float | str | None)}
    cleaned = {n: text(v) if isinstance(v, str) else v if v is None else number(v) for n, v in kept.items()}
    return {**cleaned, "step": step}


def layers_of(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return a line of diagnostics.jsonl with its layers that have all their numbers; None where it has none."""
    step, layers = whole(fields.get("step")), section(fields, "layers")
    known = {text(name): about for name, about in layers.items() if _is_layer(about)}
    return None if step is None or not known else {"step": step, "layers": known}


def _is_layer(about: Any) -> bool:
    if not isinstance(about, dict):
        return False
    counts = section(about, "histogram")
    places = all(name == "zero" or (name.removeprefix("-").isdecimal() and len(name) <= 3) for name in counts)
    numbers = [about.get(name, "") for name in ("weight_norm", "gradient_norm", "update_norm", "update_ratio")]
    return (
        places
        and all(whole(count) is not None for count in counts.values())
        and all(value is None or (isinstance(value, int | float) and abs(number(value)) < 1e300) for value in numbers)
    )
