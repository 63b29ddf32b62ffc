"""The rows of the comparison, and the ratio that each must reach."""

import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.turns import ROOT, Contestant

ORDINARY = "ordinary"  # the peer of our run in exact mode: our run without it
QUIET = "--run.trackers --run.eval-every 1000000 --run.save-every 1000000"
# The default recipe without its evaluations, in the micro-batches that its peers take by default.
CLS = f"--scratch.layers 2 --scratch.width 128 --run.micro-batch 32 --optim.warmup 20 {QUIET}"
LM = f"--scratch.tokenizer byte --data.block 256 --run.micro-batch 8 --run.global-batch 8 --sample-length 0 {QUIET}"
# Documents of uneven length: functions, from a few tokens to several blocks.
UNEVEN = "--data.path builtin:stdlib --scratch.tokenizer bpe --data.block 512"
IMG = f"--run.global-batch 64 --run.micro-batch 32 --optim.warmup 20 {QUIET}"
SEG = f"--run.global-batch 8 --run.micro-batch 8 {QUIET}"


@dataclass(frozen=True)
class Work:
    """One row: a recipe with flags, its contestants, and the ratio to reach against each."""

    name: str
    recipe: str
    flags: str
    targets: dict[str, float]
    """The ratio to reach, by peer with its options, such as "bare" or "trainer --own-order"; or ORDINARY."""
    steps: int
    """Steps of one turn."""
    bf16: bool = False
    compiled: bool = False
    gpu: bool = False
    """Whether it uses a GPU, if there is one."""
    alone: bool = False
    """Whether contestants run one after the other, each with the whole GPU memory."""
    profile: str = ""
    """A profile of accelerate_configs, for two processes; empty: one process."""
    evaluate: bool = False
    """Whether a step is one evaluation."""
    start: bool = False
    """Whether the time from the command to the end of the first step is measured; the peer is a separate script."""
    first: str = "samestep"
    """What peers are compared with; "bare" against itself shows the differences that are only noise."""
    sessions: int = 3
    """How often all contestants are restarted: on a CPU, two processes of one program differ by a few percent for as
    long as they live, because of where their memory lies."""

    def contestants(self, folder: Path, total: int) -> list[Contestant]:
        """Return the contestants with their commands, ours first."""
        flags = [*self.flags.split(), "--run.steps", str(total)]
        kind = ["--bf16"] * self.bf16 + ["--compiled"] * self.compiled + ["--evaluate"] * self.evaluate
        ours = [sys.executable, "-m", "benchmarks.contestant"]
        theirs = ours
        if self.profile:
            launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
            profile = ["--config_file", str(ROOT / f"accelerate_configs/{self.profile}.yaml")]
            ours = [*launcher, *profile, "--main_process_port", "0", "-m", "benchmarks.contestant"]
            theirs = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
            theirs += ["benchmarks.contestant"]
        own_folder = ["--run.dir", str(folder)]
        first = Contestant(f"{self.first}, first" if self.first in self.targets else self.first, [], self.gpu)
        first.command = [*ours, self.first, self.recipe, *kind, "--", *flags, *own_folder]
        contestants = [first]
        if self.start:
            script = [sys.executable, str(ROOT / "benchmarks/peers/script.py"), *script_arguments(flags, folder.parent)]
            return [*contestants, *(Contestant(peer, script) for peer in self.targets)]
        for peer in self.targets:
            if peer == ORDINARY:
                other = ["--run.dir", str(folder.with_name(peer)), "--run.exact", "false"]
                command = [*ours, "samestep", self.recipe, *kind, "--", *flags, *other]
                contestants.append(Contestant(peer, command, self.gpu))
                continue
            name, *options = peer.split()
            contestants.append(Contestant(peer, [*theirs, name, self.recipe, *kind, *options, "--", *flags], self.gpu))
        return contestants


def script_arguments(flags: list[str], folder: Path) -> list[str]:
    """Tokenize the classifier's texts; return their files, and the shape of the model."""
    import numpy as np

    from app import parse
    from recipes import cls

    config = parse(cls.Config, flags)
    rows, _, labels, tokenizer, _ = cls.load_data(config)
    np.save(folder / "labels.npy", np.asarray(labels.train_values))
    counts = [len(tokenizer), len(labels.names), config.data.max_length]
    return [str(rows.path), str(folder / "labels.npy"), *map(str, counts)]


PEERS = {"bare": 0.98, "trainer": 1.0, "accelerated": 1.0, "fabric": 1.0}


def works(texts: dict[str, str]) -> list[Work]:
    """Return all rows.

    Args:
        texts: flags of further text sets for the classifier, by name.
    """
    classifiers = []
    for name, flags in {"builtin": "", **texts}.items():
        for bf16 in (False, True):
            kind = "bf16" if bf16 else "fp32"
            one = f"{CLS} {flags} --run.global-batch 32"
            classifiers.append(Work(f"cls {name} {kind}", "cls", one, PEERS, 2, bf16))
        four = f"{CLS} --data.max-length 256 {flags} --run.global-batch 128"
        sorted_targets = {"trainer --own-order": 1.5, "accelerated": 1.5}
        classifiers.append(Work(f"cls {name} 4 x 32", "cls", four, sorted_targets, 1))
    pairs, one_at_a_time = f"{CLS} --run.global-batch 64", f"{CLS} --run.global-batch 32"
    return [
        Work("noise", "cls", one_at_a_time, {"bare": 0.0}, 2, first="bare"),
        *classifiers,
        Work("lm packed", "lm", f"{LM} {UNEVEN}", {"bare --variant padded": 1.5}, 4),
        Work("lm blocks", "lm", f"{LM} --data.packing concat", {"bare": 0.98, "trainer": 1.0}, 4),
        Work("img", "img", IMG, PEERS, 4),
        Work("seg", "seg", SEG, {**PEERS, "monai_seg": 1.0}, 4),
        Work("evaluation", "cls", one_at_a_time, {"trainer": 1.0, "accelerated": 1.0}, 1, evaluate=True),
        Work("start", "cls", one_at_a_time, {"script": 1 / 1.1}, 1, start=True),
        Work("cls DDP x2", "cls", pairs, {"bare --wrap ddp": 0.98, "accelerated": 1.0}, 4, profile="ddp_cpu"),
        Work("cls FSDP x2", "cls", pairs, {"bare --wrap BertLayer": 1.0}, 4, profile="fsdp_cpu"),
    ]
