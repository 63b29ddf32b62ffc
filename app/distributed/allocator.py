"""The memory allocator of the C library, set for training, which asks for the same sizes in every step."""

import ctypes
import os

# From malloc.h. Blocks above the first size are requested from the system and returned one by one. The heap is cut when
# more than the second size is free at its end. It grows by at least the third.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory, which the next step needs again; return whether it will.

    By default, glibc returns every block above 32 MB to the system, such as a language model's logits, and the system
    clears the pages again in each step: a fifth of the time of recipes/lm.py on a CPU. In exchange, a process may hold
    a little more memory.
    """
    # A user who has set one of malloc's own variables knows better.
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    settings = ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 1 << 26))
    return sum(mallopt(name, value) for name, value in settings) == len(settings)
