"""One of the processes that `app.launching.notebook.launch` starts: worker.py FOLDER."""

import json
import pickle
import sys
from pathlib import Path


def main() -> None:
    """Call the function that the notebook has written to the folder; the main process writes its result there."""
    folder = Path(sys.argv[1])
    sys.path[:] = json.loads((folder / "path.json").read_text())
    from app.distributed.environment import is_main_process, leave_with_launcher, report_user_errors
    from app.launching.dropped_output import outlive_readers

    outlive_readers()
    report_user_errors()
    leave_with_launcher()
    # A class that was defined in a notebook has no file; without this line it would seem to be defined in this one.
    del sys.modules["__main__"].__file__
    call, config = pickle.loads((folder / "job").read_bytes())
    result = call(config)
    if is_main_process():
        import cloudpickle

        (folder / "result").write_bytes(cloudpickle.dumps(result))


if __name__ == "__main__":
    main()
