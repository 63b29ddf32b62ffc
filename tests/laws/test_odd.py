"""Each kind of odd parameter, on each layout and in both modes: trained alike, or refused by name (odd.py)."""

import functools
import json

import pytest
from support.launching import ROOT, furthest_loss, launch, steps, weights

from app.training.optim.odd_parameters import ODDITIES
from laws import odd as script
from laws.odd import KINDS, OPTIMIZERS

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
SCRIPT = ROOT / "tests" / "laws" / "odd.py"
LAYOUTS = {"one": ("cpu", 1), "ddp2": ("ddp_cpu", 2), "fsdp2": ("fsdp_cpu", 2)}
MODES = ("ordinary", "exact")
ALL = (*KINDS, *OPTIMIZERS)
EVERYWHERE = tuple((layout, mode) for layout in LAYOUTS for mode in MODES)
SHARDED = tuple(("fsdp2", mode) for mode in MODES)
UNSHARDED = tuple(("ddp2", mode) for mode in MODES)
EXACT = tuple((layout, "exact") for layout in LAYOUTS)
SUMMED = tuple(place for place in EVERYWHERE if place != ("one", "ordinary"))  # all but the plainest
EMPTY = ("the parameter layers.1.odd has the shape", "freeze it"), SHARDED
STRIDED = ("the parameter weight of shape", "contiguous"), SHARDED
GAPS = ("the parameter weight of shape (16, 16) has gaps or repetitions", ".contiguous()"), EVERYWHERE
MIXED = ("weight (", ") and out.weight (float32) have different types", "model.float()"), SHARDED
SPARSE = ("sparse", "leave out sparse=True"), EVERYWHERE
# Of the kinds that some layout cannot train: words of the refusal, and where. All others are trained everywhere.
REFUSED = {
    "0-d": (("the parameter temperature has no dimensions", "the shape (1,)"), SHARDED),
    "0-d in a layer": (("the parameter layers.1.odd has no dimensions", "the shape (1,)"), SHARDED),
    "0-d frozen": (("the parameter temperature has no dimensions", "the shape (1,)"), SHARDED),
    "no rows": EMPTY,
    "no columns": EMPTY,
    "transposed": STRIDED,
    "every second column": GAPS,
    "channels last": STRIDED,
    "bf16 weight": MIXED,
    "float64 weight": MIXED,
    "complex": (("the parameter weight is complex", "torch.view_as_real"), (*EXACT, *SHARDED)),
    "sparse embedding": (("table is an Embedding with sparse=True", "use sparse=False"), EVERYWHERE),
    "sparse bag": (("table is an EmbeddingBag with sparse=True", "use sparse=False"), EVERYWHERE),
    "sparse by hand": SPARSE,
    "sparse bag by hand": SPARSE,
    "lazy": (("the parameter lazy.weight has no size yet", "before run.prepare"), SUMMED),
    "one for many": GAPS,
    "sparse buffer": (("the buffer numbers is sparse", "register"), EVERYWHERE),
    "sparse buffer apart": (("the buffer numbers is sparse, which DDP cannot send", "build"), UNSHARDED),
    "a layer in common": (("and layers.0.common.weight, which are one weight, as two", "NO_WRAP"), SHARDED),
    "Adagrad": (("Adagrad keeps numbers about weights from the moment it is made", "AdamW"), SHARDED),
    "Rprop": (("--optim.name Rprop does not work on shards", "AdamW"), SHARDED),
    "SparseAdam": (("--optim.name SparseAdam does not work here", "AdamW"), EVERYWHERE),
    "LBFGS": (("--optim.name LBFGS does not work here", "AdamW"), EVERYWHERE),
}


# DDP has whole parameters, so that an optimizer does there what it does on one process: `make laws` has them.
IN_LAWS = [pytest.param(kind, "ddp2", marks=pytest.mark.exhaustive) for kind in OPTIMIZERS]
PAIRS = [(kind, layout) for layout in LAYOUTS for kind in (KINDS if layout == "ddp2" else ALL)]


@pytest.fixture(scope="session")
def odd(tmp_path_factory):
    """Return a function from a layout and kinds to the folder of its runs and each rank's verdicts, which it makes."""
    root = tmp_path_factory.mktemp("odd")

    @functools.cache
    def odd(layout, kinds):
        profile, processes = LAYOUTS[layout]
        folder = root / f"{layout}-{len(kinds)}"
        folder.mkdir()
        if processes == 1:
            script.main(folder, *kinds)
        else:
            result = launch(profile, processes, SCRIPT, folder, *kinds, timeout=400)
            assert result.status == 0, result.output[-6000:]
        return folder, [json.loads((folder / f"rank-{r}.json").read_text()) for r in range(processes)]

    return lambda layout, kind: odd(layout, ALL if layout != "ddp2" else tuple(KINDS if kind in KINDS else OPTIMIZERS))


@pytest.mark.parametrize(("kind", "layout"), [*PAIRS, *IN_LAWS])
def test_it_is_trained_alike_or_refused_by_name(odd, layout, kind):
    """In exact mode with the same bits as on one process; never a traceback, and on all ranks the same."""
    words, places = REFUSED.get(kind, ((), ()))
    folder, ranks = odd(layout, kind)
    for mode in MODES:
        verdicts = [rank[f"{kind}, {mode}"] for rank in ranks]
        assert all(told == verdicts[0] for told in verdicts)
        if (layout, mode) in places:
            assert verdicts[0] and "\n" not in verdicts[0], verdicts[0]
            assert all(word in verdicts[0] for word in words), verdicts[0]
            continue
        assert verdicts[0] is None, verdicts[0]
        name = f"{kind}, {mode}".replace(" ", "-")
        one, (alone,) = odd("one", kind)
        if alone[f"{kind}, {mode}"] is None:
            same_runs(one / name, folder / name, mode)


def same_runs(one, other, mode):
    """Compare two runs to the bit in exact mode, and their losses else."""
    if mode == "exact":
        assert steps(other) == steps(one) and weights(other) == weights(one)
    assert len(steps(one)) == 3 and furthest_loss(steps(one), steps(other)) < 1e-4


def test_each_oddity_has_a_kind(odd):
    """One that is added to the list without a kind here fails."""
    told = [words for layout in LAYOUTS for words in odd(layout, "plain")[1][0].values() if words]
    for oddity in ODDITIES:
        assert any(oddity.advice.split("{shape}")[-1] in words for words in told), oddity.advice
    assert REFUSED.keys() < set(ALL)
