"""What plain compressors make of the validation text, for scale: `python -m training.compressors FOLDER`.

They start from nothing, where a trained model has read the training books; bits per byte on the same text.
"""

import bz2
import lzma
import math
import sys
from collections import defaultdict
from pathlib import Path

from training.data import books, opening


def ppm_bits(data: bytes, order: int) -> float:
    """Bits that prediction by partial matching (method C, update exclusion) needs: the longest context seen predicts,
    and escapes to shorter ones with the weight of how many different bytes it has seen."""
    contexts: defaultdict[bytes, dict[int, int]] = defaultdict(dict)
    bits = 0.0
    for at, byte in enumerate(data):
        share = 1.0
        excluded: set[int] = set()
        for size in range(min(order, at), -1, -1):
            counts = contexts[data[at - size : at]]
            open_counts = {key: n for key, n in counts.items() if key not in excluded} if excluded else counts
            whole = sum(open_counts.values()) + len(open_counts)
            found = byte in open_counts
            if whole:
                share *= (open_counts[byte] if found else len(open_counts)) / whole
            excluded |= counts.keys()
            counts[byte] = counts.get(byte, 0) + 1
            if found:
                break
        else:
            share /= 256 - len(excluded) + 1
        bits -= math.log2(share)
    return bits


def main() -> None:
    (path,) = Path(sys.argv[1]).glob("*.val.txt.xz")
    data = "\n".join(opening(book) for book in books(path)).encode()
    print(f"{len(data)} bytes")
    print(f"xz -9e      {8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data):.3f} bits per byte")
    print(f"bzip2 -9    {8 * len(bz2.compress(data)) / len(data):.3f} bits per byte")
    for order in (3, 5):
        print(f"PPM order {order} {ppm_bits(data, order) / len(data):.3f} bits per byte")


if __name__ == "__main__":
    main()
