"""One of the processes that `app.launching.notebook.launch` starts: worker.py FOLDER."""

import json
import pickle
import sys
from pathlib import Path


def main() -> None:
    """Call what the notebook has left in the folder, and leave there what the main process returned."""
    folder = Path(sys.argv[1])
    sys.path[:] = json.loads((folder / "path.json").read_text())
    from app.distributed.environment import is_main_process, leave_with_launcher, report_user_errors

    report_user_errors()
    leave_with_launcher()
    # What was defined in a notebook has no file; a class of it would else seem to come from this one.
    del sys.modules["__main__"].__file__
    call, config = pickle.loads((folder / "job").read_bytes())
    result = call(config)
    if is_main_process():
        import cloudpickle

        (folder / "result").write_bytes(cloudpickle.dumps(result))


if __name__ == "__main__":
    main()
