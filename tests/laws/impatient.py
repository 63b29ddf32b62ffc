"""Run recipes as many.py does, in processes that wait for a store for seconds alone.

impatient.py FILE: see many.py.
"""

import json
import sys
from pathlib import Path

from app.storage.bucket import BucketStorage
from app.storage.objects import Patience

PATIENCE = Patience(seconds=4, silence=1, first_wait=0.05, longest_wait=0.5)


def be_impatient() -> None:
    """Have all storages of buckets wait less."""
    begin = BucketStorage.__init__
    BucketStorage.__init__ = lambda self, address, local=None: begin(self, address, local, PATIENCE)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from laws import many

    be_impatient()
    many.main(json.loads(Path(sys.argv[1]).read_text()))
