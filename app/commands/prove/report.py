"""The verdict on each run of a proof, and the report on all."""

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from app.commands.output import table
from app.commands.prove.compare import EXACT, ORDINARY, Comparison, Growth, Tolerances, compare
from app.commands.prove.difference import Difference
from app.commands.prove.trial import OUTPUT, Trial
from app.distributed.layout import changes_bits
from app.sampling.hashing import hash_of

# These refusals are results. Any other refusal means that the run was started with wrong flags.
_NOT_EXACT = re.compile(r"--run\.exact: ")
_RANKS_DIFFER = re.compile(r"rank \d+ (would go through|has drifted)")
_LAYOUT = ("data_ranks", "processes", "wrapping", "precision", "device")
ROUNDING = "rounding that grows"


@dataclass
class Row:
    """One run in a report.

    Args:
        verdict: reference; same; different, from the reference or between its own ranks; rounding that grows, if it is
            different in the ordinary mode and the same in exact mode; refused, if exact mode cannot make it the same;
            failed, if it ended early; not run, if its flags were wrong.
    """

    trial: Trial
    comparison: Comparison
    verdict: str
    notes: list[str] = field(default_factory=list)


@dataclass
class Report:
    """Runs of one recipe, each compared with the first."""

    recipe: str
    flags: list[str]
    steps: int
    exact: bool
    rows: list[Row] = field(default_factory=list)

    @property
    def tolerances(self) -> Tolerances:
        """Return the deviations up to which runs count as the same."""
        return EXACT if self.exact else ORDINARY

    @property
    def status(self) -> int:
        """Return 0 if all are the same but for rounding, 1 if one is not, 2 if one had wrong flags."""
        verdicts = {row.verdict for row in self.rows}
        return 1 if verdicts & {"different", "refused", "failed"} else 2 * ("not run" in verdicts)

    def add(self, trial: Trial) -> Row:
        """Add a run, and compare it with the first one."""
        reference = self.rows[0].trial if self.rows else trial
        comparison = compare(reference.trace, trial.trace, self.tolerances)
        row = Row(trial, comparison, _verdict(trial, comparison, is_reference=not self.rows))
        row.notes = _notes(reference, row, self.exact) if trial.record and reference.record else []
        self.rows.append(row)
        return row

    def suspects(self) -> list[Row]:
        """List the runs that may differ by rounding alone, which training in exact mode can tell."""
        rows = [] if self.exact else self.rows[1:]
        return [row for row in rows if row.comparison.may_be_rounding and not row.trial.ended]

    def tell_rounding(self, row: Row, reference: Trial, other: Trial) -> None:
        """Decide whether a suspect differs by rounding alone, from the reference and the suspect in exact mode."""
        exactly = compare(reference.trace, other.trace, EXACT)
        ended = reference.ended or other.ended
        if ended:
            row.notes.append(f"rounding or not: exact mode cannot tell ({ended})")
        elif exactly.first:
            row.notes.append(f"it is not rounding alone: in exact mode too it is different ({exactly.first})")
        else:
            row.verdict = ROUNDING
            row.notes.append(
                f"in exact mode it has the bits of the reference in all {exactly.steps} steps: what differs here is "
                "rounding, which this training makes grow"
            )

    def text(self) -> str:
        """Return the table of runs, and below it what differs and what that usually means."""
        head = ("profile", "layout", "steps", "last loss", "weights", "verdict", "first difference")
        lines = [table(head, [_cells(row) for row in self.rows], right=[2])]
        for row in self.rows:
            told = [*_details(row), *row.notes, *row.trial.warnings]
            lines += [f"\n{row.trial.chain.name}:", *(f"  {line}" for line in told)] if told else []
        return "\n".join([*lines, "", self.summary()])

    def summary(self) -> str:
        """Return the result in one line."""
        others = [row for row in self.rows if row.verdict not in ("reference", "same")]
        if not others:
            how = "to the last bit" if self.exact else f"within {_in_words(self.tolerances)}"
            kind = "runs" if any(len(row.trial.chain.launches) > 1 for row in self.rows) else "profiles"
            return f"same: {len(self.rows)} {kind}, {self.steps} steps, {how}"
        return "; ".join(f"{row.trial.chain.name}: {row.verdict}" for row in others)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        fields = {"recipe": self.recipe, "flags": self.flags, "steps": self.steps, "exact": self.exact}
        fields |= {"status": self.status, "summary": self.summary(), "tolerances": self.tolerances._asdict()}
        return {**fields, "profiles": [_row_as_dict(row) for row in self.rows]}


def _verdict(trial: Trial, comparison: Comparison, is_reference: bool) -> str:
    if comparison.first or _RANKS_DIFFER.match(trial.ended):
        return "different"
    if _NOT_EXACT.match(trial.ended):
        return "refused"
    if trial.ended:
        return "not run" if trial.refused and not trial.begun else "failed"
    return "reference" if is_reference else "same"


def _cells(row: Row) -> tuple:
    trial = row.trial
    layout = str(trial.record.layout) if trial.record and len(trial.chain.launches) == 1 else ""
    losses = losses_of(trial)
    last, weights = (losses[-1], _digest(trial)) if losses else ("", "")
    return trial.chain.name, layout, row.comparison.steps, last, weights, row.verdict, _first(row)


def _digest(trial: Trial) -> str:
    """Return a hash of all weights after the last step."""
    weights = trial.trace.steps[trial.made]["weights"]
    return hash_of({name: weights[name]["hash"] for name in sorted(weights)})


def _first(row: Row) -> str:
    """Return step, quantity and place of the first difference in a few words, or why the run ended."""
    first, tensor = row.comparison.first, row.comparison.tensor
    if first is None:
        return row.trial.ended if len(row.trial.ended) <= 60 else row.trial.ended[:57] + "..."
    places = tensor.places if tensor and tensor.step == first.step else first.places
    return f"step {first.step}: {first.what}" + (f", {places[0]}" if places else "")


def _details(row: Row) -> list[str]:
    first, tensor = row.comparison.first, row.comparison.tensor
    told = [str(first), *([first.means] if row.verdict != ROUNDING else [])] if first else []
    told += [f"first tensor that differs: {tensor}"] if tensor and tensor is not first else []
    return told + ([f"{row.trial.ended} (see {row.trial.folder / OUTPUT})"] if row.trial.ended else [])


def _notes(reference: Trial, row: Row, exact: bool) -> list[str]:
    """List what the user should know about how a run was compared."""
    trial = row.trial
    notes = [f"it went from {trial.chain.path}"] if trial.chain.path else []
    asked = trial.chain.profile.processes
    if trial.record is None or reference.record is None:  # it never began
        return notes
    layout, reference_layout = trial.record.layout, reference.record.layout
    if layout.processes != asked:
        notes.append(f"{layout.processes} of the {asked} processes that were asked for have trained")
    alone = trial is not reference and len(trial.chain.launches) == 1
    if alone and all(getattr(layout, name) == getattr(reference_layout, name) for name in _LAYOUT):
        notes.append("this is the layout of the reference: it shows that a run repeats, and no more")
    changes = changes_bits(reference_layout, reference.record.versions, layout)
    changes = [change for change in changes if exact or "threads" not in change]
    if row.verdict == "different" and changes:
        notes.append(f"in addition to the layout, {'; '.join(changes)}: that alone changes bits")
    growths = _growths(row)
    if growths and not exact:
        notes.append(f"apart from the reference: {'; '.join(f'{what} {growth}' for what, growth in growths.items())}")
    return notes


def _growths(row: Row) -> dict[str, Growth]:
    growths = {what: row.comparison.growth(what) for what in row.comparison.deviations}
    return {what: growth for what, growth in growths.items() if growth}


def _in_words(tolerances: Tolerances) -> str:
    return f"{tolerances.loss:g} of losses, {tolerances.gradient:g} of gradients, {tolerances.weights:g} of weights"


def _row_as_dict(row: Row) -> dict[str, Any]:
    trial, comparison = row.trial, row.comparison
    return {
        "profile": trial.chain.name,
        "launches": [
            {"file": str(profile.file), "processes": profile.processes, "until": until}
            for profile, until in trial.chain.launches
        ],
        "verdict": row.verdict,
        "steps": comparison.steps,
        "ended": trial.ended,
        "first": _difference_as_dict(comparison.first),
        "tensor": _difference_as_dict(comparison.tensor),
        "notes": row.notes,
        "warnings": trial.warnings,
        "layout": {**trial.record.layout.to_json(), **trial.record.versions} if trial.record else {},
        "seconds": round(trial.seconds, 1),
        "folder": str(trial.folder),
        "losses": losses_of(trial),
        "weights": _digest(trial) if trial.begun else None,
        "deviations": comparison.deviations,
        "growth": {what: {**growth._asdict(), "rate": growth.rate} for what, growth in _growths(row).items()},
    }


def _difference_as_dict(difference: Difference | None) -> dict[str, Any] | None:
    return {**asdict(difference), "means": difference.means} if difference else None


def losses_of(trial: Trial) -> list[float | None]:
    """List the loss of every step; of several losses, the first by name."""
    steps = [line for step, line in sorted(trial.trace.steps.items()) if step]
    return [line.get(next(iter(line["losses"]), "loss")) for line in steps]
