"""Like many.py, for several ranks that share one GPU: `laws/staged.py` carries what they exchange.

On a machine without a GPU the ranks are on the CPU, and exchange in the same way. What they have exchanged, and from
which kind of device, the first rank writes next to the list of commands.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def share() -> None:
    """Have this process and the others of its launch take the first GPU.

    accelerate gives a rank the GPU of its number modulo how many there are. Nothing here may start CUDA: exact mode
    chooses its libraries' kernels before that.
    """
    from app.distributed import environment
    from laws import staged

    # accelerate 1.15 would hand DDP the GPU of this rank's own number, which is not there.
    os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"
    if environment.gpus_here():
        environment.gpus_here = environment.local_world_size  # as many as are asked for
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
