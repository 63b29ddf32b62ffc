"""Like many.py, for several ranks that share one GPU; their collectives go through `laws/staged.py`.

On a machine without a GPU the ranks use the CPU, and the same collectives. The first rank writes which collectives ran,
and on which kind of device, next to the list of commands.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def share() -> None:
    """Make all processes of the launch use the first GPU.

    accelerate gives rank r the GPU r modulo the number of GPUs. Nothing here may start CUDA: exact mode must choose the
    kernels of its libraries before.
    """
    from app.distributed import environment
    from laws import staged

    # accelerate 1.15 would give DDP the GPU with this rank's number, which does not exist.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    if environment.gpus_here():
        environment.gpus_here = environment.local_world_size  # claims one GPU for each rank
    staged.join()


if __name__ == "__main__":
    from laws.many import main

    file, several = Path(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        share()
    main(json.loads(file.read_text()))
    if several and os.environ["RANK"] == "0":
        import torch.distributed as dist

        file.with_suffix(".exchanged").write_text("\n".join(sorted(dist.group.WORLD.seen)))
