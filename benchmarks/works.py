"""What is compared with what, and what must be reached."""

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.turns import ROOT, Contestant

QUIET = "--run.trackers --run.eval-every 1000000 --run.save-every 1000000"
# Two layers of 256, micro-batches of 32: what a step of the default recipe costs, without its evaluations.
CLS = f"--scratch.layers 2 --scratch.width 128 --run.micro-batch 32 --optim.warmup 20 {QUIET}"
LM = f"--scratch.tokenizer byte --data.block 256 --run.micro-batch 8 --run.global-batch 8 --sample-length 0 {QUIET}"
IMG = f"--run.global-batch 64 --run.micro-batch 32 --optim.warmup 20 {QUIET}"
SEG = f"--run.global-batch 8 --run.micro-batch 8 {QUIET}"


@dataclass(frozen=True)
class Work:
    """One row: a recipe with flags, its contestants, and the ratio to reach against each."""

    name: str
    recipe: str
    flags: str
    targets: dict[str, float]
    """By peer, with its options behind it: "bare", "trainer --own-order"."""
    steps: int
    """Of one turn."""
    bf16: bool = False
    profile: str = ""
    """Of accelerate_configs, for two processes; one without."""
    evaluate: bool = False
    """A step is one evaluation."""

    def contestants(self, folder: Path, total: int) -> list[Contestant]:
        """Make the commands: ours first."""
        flags = [*self.flags.split(), "--run.steps", str(total)]
        kind = ["--bf16"] * self.bf16 + ["--evaluate"] * self.evaluate
        ours = [sys.executable, "-m", "benchmarks.contestant"]
        theirs = ours
        if self.profile:
            launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
            profile = ["--config_file", str(ROOT / f"accelerate_configs/{self.profile}.yaml")]
            ours = [*launcher, *profile, "--main_process_port", "0", "-m", "benchmarks.contestant"]
            theirs = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
            theirs += ["benchmarks.contestant"]
        found = [
            Contestant("samestep", [*ours, "samestep", self.recipe, *kind, "--", *flags, "--run.dir", str(folder)])
        ]
        for peer in self.targets:
            name, *options = peer.split()
            found.append(Contestant(peer, [*theirs, name, self.recipe, *kind, *options, "--", *flags]))
        return found


PEERS = {"bare": 0.98, "trainer": 1.0, "accelerated": 1.0, "fabric": 1.0}


def works(texts: dict[str, str]) -> list[Work]:
    """List all works.

    Args:
        texts: flags of further text sets for the classifier, by name.
    """
    found = []
    for name, flags in {"builtin": "", **texts}.items():
        for bf16 in (False, True):
            kind = "bf16" if bf16 else "fp32"
            one = f"{CLS} {flags} --run.global-batch 32"
            found.append(Work(f"cls {name} {kind}", "cls", one, PEERS, 12, bf16))
        four = f"{CLS} {flags} --run.global-batch 128"
        sorted_targets = {"trainer --own-order": 1.5, "accelerated": 1.5}
        found.append(Work(f"cls {name} 4 x 32", "cls", four, sorted_targets, 4))
    pairs, one_at_a_time = f"{CLS} --run.global-batch 64", f"{CLS} --run.global-batch 32"
    return [
        *found,
        Work("lm packed", "lm", LM, {"bare --variant padded": 1.5}, 8),
        Work("lm blocks", "lm", f"{LM} --data.packing concat", {"bare": 0.98, "trainer": 1.0}, 8),
        Work("img", "img", IMG, PEERS, 8),
        Work("seg", "seg", SEG, {"bare": 0.98, "accelerated": 1.0}, 8),
        Work("evaluation", "cls", one_at_a_time, {"trainer": 1.0, "accelerated": 1.0}, 1, evaluate=True),
        Work("cls DDP x2", "cls", pairs, {"bare --wrap ddp": 0.98, "accelerated": 1.0}, 6, profile="ddp_cpu"),
        Work("cls FSDP x2", "cls", pairs, {"bare --wrap BertLayer": 1.0}, 6, profile="fsdp_cpu"),
    ]
