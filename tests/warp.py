"""What units.py does, in numpy: its own operations take Triton's interpreter a hundred times as long.

test_triton_units.py holds one against the other.
"""

import numpy as np

LEFT = [(0, 0), (8, 0), (0, 4), (8, 4)]  # where the numbers of thread 0 are in a factor [16, 8]; and those of others
M, N = np.arange(32) // 4, np.arange(32) % 4


def tensor(data: np.ndarray):
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    data = np.ascontiguousarray(data, np.float32)
    return tl.tensor(TensorHandle(data, tl.float32), tl.block_type(tl.float32, list(data.shape)))


def number(x) -> np.ndarray:
    return x.handle.data


def taken(x: np.ndarray) -> np.ndarray:
    return (x.view(np.int32) & -8192).view(np.float32)


def parts(x):
    high = taken(number(x))
    return tensor(high), tensor(number(x) - high)


def four(x):
    return tuple(tensor(number(x)[:, column]) for column in range(4))


def beside(*columns):
    return tensor(np.stack([number(each) for each in columns], 1))


def add_product(to, left, right, ptx=False):
    a, b = np.zeros((16, 8), np.float32), np.zeros((8, 8), np.float32)
    for (m, n), each in zip(LEFT, left, strict=True):
        a[M + m, N + n] = taken(number(each))
    b[N, M], b[N + 4, M] = (taken(number(each)) for each in right)
    made = a @ b
    places = [(M, 2 * N), (M, 2 * N + 1), (M + 8, 2 * N), (M + 8, 2 * N + 1)]
    return tuple(tensor(number(each) + made[place]) for each, place in zip(to, places, strict=True))


FASTER = {"four": four, "beside": beside, "parts": parts, "add_product": add_product}
