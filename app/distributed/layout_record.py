"""The layout of a run as run.json and records of checkpoints hold it: what decides the bits, besides the settings."""

from dataclasses import dataclass

from app.errors import UserError
from app.storage.records import JsonRecord


@dataclass(frozen=True)
class Layout(JsonRecord):
    """Everything except the config and the versions that decides the bits of a run's results."""

    data_ranks: int = 1
    processes: int = 1
    wrapping: str = ""
    """Of the model; empty on one process."""
    precision: str = "fp32"
    device: str = "cpu"
    threads: int = 1
    kernels: str = ""
    """Of torch, on the CPU."""
    deterministic: bool = False
    compile: str = "no"
    """The backend of torch.compile."""

    @property
    def is_bound(self) -> bool:
        """Tell whether checkpoints of this layout can be read on the same layout only."""
        return self.wrapping.startswith("DeepSpeed")

    def check_reads(self, saved: "Layout") -> None:
        """Refuse a checkpoint that can be read on another layout only.

        Raises:
            UserError: DeepSpeed saved it, or is to read it, on another layout.
        """
        same = (saved.wrapping, saved.processes) == (self.wrapping, self.processes)
        if (saved.is_bound or self.is_bound) and not same:
            raise UserError(
                f"the checkpoint was saved on {saved}, this is {self}: DeepSpeed's checkpoints are bound to their "
                "layout; go on under the profile that it was saved with"
            )

    def __str__(self) -> str:
        """Describe it in a few words."""
        kind = [self.wrapping] if self.wrapping else []
        ranks = f"{self.data_ranks} data rank{'s' * (self.data_ranks > 1)}"
        return ", ".join([ranks, *kind, self.precision, self.device])
