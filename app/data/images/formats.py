"""Which formats of pictures there are, by the endings of their files: the one list for all readers.

pictures.py opens them, by Pillow.
"""

EXACT = (".png", ".tif", ".tiff", ".bmp")
"""Those that keep every value, as masks need."""
LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo")
_COMMON = (".webp", ".gif", ".apng", ".dib", ".ppm", ".pgm", ".pbm", ".pnm", ".ico", ".icns")
_RARE = (".tga", ".pcx", ".dds", ".xbm", ".sgi", ".rgb", ".rgba", ".bw", ".ras", ".psd")
_JPEG_2000 = (".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx")
ENDINGS = frozenset((*EXACT, *LOSSY, *_COMMON, *_RARE, *_JPEG_2000))
