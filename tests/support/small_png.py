"""PNG files with a palette: a browser's screenshots in a third of their size."""

import struct
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

SIGNATURE = b"\x89PNG\r\n\x1a\n"
NUM_COMMON, NUM_COLOURS = 128, 256  # colours of the palette: the most common ones, then those far from all others
CHANNELS = {2: 3, 6: 4}  # by colour type: RGB, and RGB with alpha

Pixels = NDArray[np.uint8]


def with_palette(png: bytes) -> bytes:
    """Return a truecolour PNG of eight bits as one with a palette; rarer colours become the nearest of the palette."""
    pixels = _pixels(png)
    height, width, _ = pixels.shape
    colours, places, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    palette, nearest = _palette(colours, counts)
    indices = nearest[places.reshape(-1)].reshape(height, width)
    rows = np.concatenate([np.zeros((height, 1), np.uint8), indices], axis=1)  # no filter: the best one for a palette
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", header),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    return SIGNATURE + b"".join(_chunk(kind, content) for kind, content in chunks)


def _palette(colours: Pixels, counts: NDArray[np.intp]) -> tuple[Pixels, Pixels]:
    """Return a palette [P, 3], and for each colour [C, 3] its place in it. [C]"""
    chosen = list(np.argsort(-counts, kind="stable")[:NUM_COMMON])
    exact = colours.astype(np.int32)
    distances = np.stack([((exact - exact[place]) ** 2).sum(axis=1) for place in chosen])  # [P, C]
    while len(chosen) < min(NUM_COLOURS, len(colours)):
        chosen.append(distances.min(axis=0).argmax())
        distances = np.vstack([distances, ((exact - exact[chosen[-1]]) ** 2).sum(axis=1)])
    return colours[chosen], distances.argmin(axis=0).astype(np.uint8)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    begin = len(SIGNATURE)
    while begin < len(png):
        (size,) = struct.unpack_from(">I", png, begin)
        yield png[begin + 4 : begin + 8], png[begin + 8 : begin + 8 + size]
        begin += size + 12


def _pixels(png: bytes) -> Pixels:
    """Return the colours. [height, width, 3]"""
    chunks = list(_chunks(png))
    width, height, depth, kind = struct.unpack(">IIBB", dict(chunks)[b"IHDR"][:10])
    assert depth == 8
    data = zlib.decompress(b"".join(content for name, content in chunks if name == b"IDAT"))
    size = CHANNELS[kind]
    rows = np.frombuffer(data, np.uint8).reshape(height, 1 + width * size)
    before = np.zeros(width * size, np.uint8)
    pixels = np.empty((height, width * size), np.uint8)
    for number, row in enumerate(rows):
        before = pixels[number] = _unfiltered(int(row[0]), row[1:], before, size)
    return pixels.reshape(height, width, size)[:, :, :3]


def _unfiltered(kind: int, row: Pixels, above: Pixels, size: int) -> Pixels:
    """Undo a row's filter (PNG specification, section 9); arithmetic is modulo 256."""
    if kind == 0:
        return row
    if kind == 2:
        return row + above
    if kind == 1:
        return np.cumsum(row.reshape(-1, size), axis=0, dtype=np.uint8).reshape(-1)
    values, over = row.astype(int).tolist(), above.astype(int).tolist()
    for place in range(len(values)):
        left = values[place - size] if place >= size else 0
        corner = over[place - size] if place >= size else 0
        guess = (left + over[place]) // 2 if kind == 3 else _paeth(left, over[place], corner)
        values[place] = (values[place] + guess) & 255
    return np.array(values, np.uint8)


def _paeth(left: int, above: int, corner: int) -> int:
    estimate = left + above - corner
    return min((left, above, corner), key=lambda value: abs(estimate - value))
