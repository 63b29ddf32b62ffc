"""Count what a GPU would be sent: torch's operations, without those that only look at memory in another way."""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

SILENT = ("empty", "detach", "lift_fresh", "alias", "resize_", "set_")


class Launches(TorchDispatchMode):
    """Count operations by their names while it is entered, forward and backward."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::").partition(".")[0]
        returns = function._schema.returns
        view = returns and all(each.alias_info and not each.alias_info.is_write for each in returns)
        if function.namespace == "aten" and not view and not name.startswith(SILENT):
            self.found[name] += 1
        return function(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.found.values())
