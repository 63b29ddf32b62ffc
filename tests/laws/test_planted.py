"""python -m app prove: a healthy recipe passes, and each planted fault is caught and named."""

import json
import sys

import pytest
from support.launching import PROFILES, ROOT, launch_many, run

from app import parse
from app.commands.prove import command
from app.commands.prove.chart import draw
from app.commands.prove.report import Report
from app.commands.prove.trial import Chain, trial_of
from app.launching import profiles
from laws.many import load

RECIPE = ROOT / "tests" / "laws" / "planted.py"
STEPS = 3
PROVEN = 2  # steps of a run that goes from one layout to the other, in a launch each
# By fault: what the report must call the cause, and the micro-batches or tensors where it must show first.
FOUND = {
    "start": ("weights", {"first.weight", "out.weight"}),
    "samples": ("samples", set()),
    "augmentation": ("inputs", {"micro-batch 2"}),
    "loss": ("loss", {"micro-batch 2"}),
    "weights": ("loss weights", set()),
    "average": ("gradient norm", set()),
    "rate": ("learning rate", set()),
    "update": ("weights", {"first.weight"}),
}


def flags(folder, exact, fault):
    audited = ["--run.audit", "true", "--run.log-every", 1, "--run.stop-at", STEPS, "--run.save-async", "false"]
    return ["--fault", fault, *audited, "--run.exact", exact, "--run.dir", folder / f"{fault}-{exact}"]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Return a function from a fault to the report on two ranks with it, against one process without."""
    root = tmp_path_factory.mktemp("planted")
    healthy = [("none", "true"), ("none", "false"), ("buffer", "false")]
    recipe = load(RECIPE)
    for fault, exact in healthy:
        recipe.main(parse(recipe.Config, [str(word) for word in flags(root / "cpu", exact, fault)]))
    cases = [*healthy, *((fault, "true") for fault in FOUND), ("average", "false")]
    launch_many("ddp_cpu", 2, RECIPE, [flags(root / "ddp_cpu", exact, fault) for fault, exact in cases], root)

    def planted(fault, exact="true"):
        report = Report("planted.py", [], STEPS, exact == "true")
        for profile, name in (("cpu", fault if (fault, exact) in healthy else "none"), ("ddp_cpu", fault)):
            file = profiles.read(str(PROFILES / f"{profile}.yaml"))
            report.add(trial_of(Chain([(file, STEPS)]), root / profile / f"{name}-{exact}", "", 0.0))
        return report

    planted.root = root
    return planted


@pytest.mark.parametrize("exact", ["true", "false"])
def test_two_ranks_that_are_healthy(planted, exact):
    report = planted("none", exact)
    assert report.status == 0 and [row.verdict for row in report.rows] == ["reference", "same"]
    row = report.rows[1]
    assert row.comparison.steps == STEPS and row.trial.record.layout.data_ranks == 2
    assert exact == "false" or set(row.comparison.deviations["weights"]) == {0.0}


@pytest.mark.parametrize("fault", FOUND)
def test_a_planted_fault_is_caught_in_its_first_step_and_named(planted, fault):
    report, (what, places) = planted(fault), FOUND[fault]
    first, tensor = report.rows[1].comparison.first, report.rows[1].comparison.tensor
    assert report.status == 1 and report.rows[1].verdict == "different"
    assert (first.what, first.step) == (what, 0 if fault == "start" else 1)
    assert set(first.places[:1]) <= places and bool(first.places) == bool(places)
    assert f"different  step {first.step}: {what}, {tensor.places[0]}\n" in report.text()
    assert str(first) in report.text() and first.means in report.text()


def test_a_gradient_averaged_on_each_rank_in_the_ordinary_mode(planted):
    found = planted("average", "false").rows[1].comparison
    assert (found.first.what, found.first.step) == ("gradient norm", 1) and "weighting" in found.first.means


def test_a_buffer_that_remembers_what_a_process_has_seen(planted):
    """Steps agree with one process, but the buffer does not."""
    report = planted("buffer", "false")
    first = report.rows[1].comparison.first
    assert (first.what, first.step, report.status) == ("buffers", 1, 1) and "codebook" in first.means
    assert set(first.places) == {"norm.seen"}


def test_an_audit_goes_on_with_its_run(planted, tmp_path):
    """After a stop and a resume, its lines have the bits of the run that never stopped."""
    recipe, words = load(RECIPE), [str(word) for word in flags(tmp_path, "true", "none")]
    for stop in (1, STEPS):
        recipe.main(parse(recipe.Config, [*words, "--run.stop-at", str(stop)]))
    there, never_stopped = (path / "none-true" / "audit.jsonl" for path in (tmp_path, planted.root / "cpu"))
    assert there.read_bytes() == never_stopped.read_bytes() and len(there.read_bytes().splitlines()) == STEPS + 1


def test_a_picture_of_the_runs(planted, tmp_path):
    pytest.importorskip("matplotlib")
    assert draw(planted("average"), tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_prove_says_that_layouts_are_the_same(tmp_path):
    """Also if a run goes from one to the other. The recipe's own flags pass through; only small files stay."""
    folder, chosen = tmp_path / "report", [PROFILES / "cpu.yaml", f"{PROFILES / 'fsdp_cpu.yaml'}:2"]
    own = ["--steps", PROVEN, "--report", folder, "--json", tmp_path / "copy.json", "--across", "cpu", "ddp_cpu:2"]
    result = run([sys.executable, "-m", "app", "prove", RECIPE, "--profiles", *chosen, *own, "--optim.lr", 1e-3])
    assert result.status == 0 and f"same: 3 runs, {PROVEN} steps, to the last bit" in result.output, result.output
    report = json.loads((folder / "report.json").read_text())
    assert json.loads((tmp_path / "copy.json").read_text()) == report and report["status"] == 0
    reference, same, across = report["profiles"]
    assert across["verdict"] == "same" and len(across["launches"]) == across["steps"] == PROVEN
    assert (reference["verdict"], same["verdict"], same["layout"]["wrapping"]) == ("reference", "same", "FSDP2")
    assert same["deviations"] == dict.fromkeys(("loss", "gradient norm", "weights"), [0.0] * PROVEN)
    assert len(reference["losses"]) == PROVEN and f"step {PROVEN}/{PROVEN}" in result.output
    assert "lr: 0.001" in (folder / "01-cpu" / "config.yaml").read_text()
    assert not [*folder.glob("*/checkpoints"), *folder.glob("*/model")]


@pytest.mark.launches
def test_prove_turns_a_refusal_of_exact_mode_into_its_verdict(tmp_path, capsys):
    chosen = (str(PROFILES / "cpu.yaml"), str(PROFILES / "ddp_cpu.yaml"))
    options = command.Options(RECIPE, chosen, STEPS, report=str(tmp_path / "report"))
    assert command.main(options, ["--fault", "norm"]) == 1
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [row["verdict"] for row in report["profiles"]] == ["refused"]
    assert "norm is a SyncBatchNorm" in report["profiles"][0]["ended"]
    assert "norm is a SyncBatchNorm" in capsys.readouterr().out
