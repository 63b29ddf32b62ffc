"""The toy recipe on ranks that share no disk: each has a cache of its own, where files on their way to a bucket lie.

accelerate launch tests/laws/toy_apart.py --run.dir s3://bucket/runs/toy
"""

import os

from toy import Config, train

from app import parse

if __name__ == "__main__":
    os.environ["XDG_CACHE_HOME"] += f"/rank-{os.environ.get('RANK', '0')}"
    train(parse(Config))
