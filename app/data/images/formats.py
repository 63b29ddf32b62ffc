"""Which formats of pictures there are, by the endings of their files: the one list for all readers.

pictures.py opens them, by Pillow.
"""

EXACT = (".png", ".tif", ".tiff", ".bmp")
"""Those that keep every value, as masks need."""
LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo")
_OTHERS = (
    *(
        ".webp",
        ".gif",
        ".apng",
        ".dib",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".tga",
        ".pcx",
        ".ico",
        ".icns",
        ".dds",
        ".xbm",
    ),
    *(".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx", ".sgi", ".rgb", ".rgba", ".bw", ".ras", ".psd"),
)
ENDINGS = frozenset((*EXACT, *LOSSY, *_OTHERS))
