"""Save state, and load all that other layouts have saved: python state_folders.py ROOT NAME [WHAT ...].

No Run: a plain loop with our Accelerator. A model of transformers, so that its layers can be split. WHAT is done then:
models: write the models of writing.py into ROOT/models/NAME; refused: ask for what is refused, in the end on one rank.
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
import writing
from transformers import LlamaConfig, LlamaForCausalLM

from app import Accelerator, UserError

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


class Seen:
    """What is no model, in all kinds that a checkpoint keeps."""

    def __init__(self):
        self.content = {"ids": torch.zeros(3, dtype=torch.int64), "nested": [None, {1: "zero"}], "pair": (0, 0.5)}

    def state_dict(self):
        """Return the content."""
        return self.content

    def load_state_dict(self, content):
        """Take the content."""
        self.content = content


def prepared(seed: int):
    """Return our Accelerator with a new model, optimizer, schedule, averages and an object that is registered."""
    accelerator = Accelerator()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=False, **SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.averages |= {parameter: parameter.detach().clone() for parameter in model.parameters()}
    seen = Seen()
    accelerator.register_for_checkpointing(seen)
    return accelerator, model, optimizer, schedule, seen


def main(root: Path, name: str, *more: str) -> None:
    """Train two steps from a seed of this layout and save; then load every state that is there, and save it again."""
    accelerator, model, optimizer, schedule, seen = prepared(len(name))
    for step in range(2):
        ids = torch.randint(40, (4, 9), generator=torch.Generator().manual_seed(step))
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    seen.content = {"ids": torch.arange(len(name)), "nested": [name, {1: "one"}], "pair": (1, 0.1)}
    folder = root / "states"
    if not (folder / name).exists():
        accelerator.save_state(folder / name)
        drawn = draw()
        accelerator.load_state(folder / name)
        assert draw() == drawn, "the generators of random numbers are not those that were saved"
    for saved in sorted(path.name for path in folder.iterdir() if "-" not in path.name):
        accelerator.load_state(folder / saved)
        assert seen.content["nested"][0] == saved
        accelerator.save_state(folder / f"{saved}-{name}")
    if "models" in more:
        writing.main(root / "models" / name)
    if "refused" in more:
        refused(accelerator, seen, root)
    accelerator.end_training()


def refused(accelerator: Accelerator, seen: Seen, root: Path) -> None:
    """Load a folder that is not there, and write each rank's error; save what the last rank may not, which ends all."""
    try:
        accelerator.load_state(root / "states" / "gone")
    except UserError as error:
        (root / f"gone-{accelerator.process_index}").write_text(str(error))
    seen.content = {"what": object() if accelerator.is_last_process else 1}
    accelerator.save_state(root / "states" / "refused")


def draw() -> tuple:
    """Draw from each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
