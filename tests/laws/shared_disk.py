"""Train the toy recipe on a disk whose flock does not reach other machines: shared_disk.py HOST FLAGS ...

The run takes HOST for the name of its machine. Before a run takes over a folder, it watches the lock for half a second.
"""

import fcntl
import sys

import toy

from app import parse
from app.rundir import lock

if __name__ == "__main__":
    _, host, *flags = sys.argv
    lock.BEAT = 0.25
    lock.socket.gethostname = lambda: host
    fcntl.flock = lambda descriptor, operation: None
    toy.train(parse(toy.Config, flags))
