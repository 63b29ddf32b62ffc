"""From a command line or a notebook cell to processes."""
