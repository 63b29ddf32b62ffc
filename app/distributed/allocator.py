"""The C library's memory allocator, told that a training process asks for the same sizes again and again."""

import ctypes
import os

# Of malloc.h. Blocks larger than the first are taken from the system and given back one by one; a heap with more free
# space at its end than the second is cut; it grows by at least the third.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, for the next step asks for the same; says whether it will.

    As it is, glibc gives every block above 32 MB back, such as a language model's logits, and the system clears its
    pages again in each step: a fifth of the time of recipes/lm.py on a CPU. A process may hold a little more for it.
    """
    # Whoever has set one of malloc's own variables knows better.
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    settings = ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1), (_TOP_PAD, 1 << 26))
    return sum(mallopt(name, value) for name, value in settings) == len(settings)
