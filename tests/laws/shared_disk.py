"""Train the toy recipe in a folder on a disk whose flock does not reach other machines: shared_disk.py HOST FLAGS ...

The run believes that it is on a machine of that name; runs watch each other for about half a second.
"""

import sys

import toy

from app import parse
from app.rundir import lock

if __name__ == "__main__":
    _, host, *flags = sys.argv
    lock.BEAT = 0.25
    lock.socket.gethostname = lambda: host
    lock.fcntl.flock = lambda descriptor, operation: None
    toy.train(parse(toy.Config, flags))
