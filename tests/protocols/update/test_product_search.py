"""Outer products found many at a time: about the best of so many, the same bits with any threads."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from fleetune.protocols.randomness import Key
from fleetune.protocols.update.products import WholeMatrix, gram, product, products_of, sum_of

DIGEST = """
import hashlib
from tests.protocols.update.test_product_search import decaying
from fleetune.protocols.update.products import products_of
data = hashlib.sha256()
for one in products_of(decaying(400, 900), None, 255):
    data.update(one.left.tobytes() + one.right.tobytes())
print(data.hexdigest())
"""


def drawn(seed):
    return Key(seed).generator()


def decaying(rows, columns, first=4000.0, factor=0.9, noise=0.1):
    """A matrix in steps whose singular values fall by this factor, and noise in each entry."""
    draw = drawn(3)
    count = max(1, min(rows, columns) // 3)
    left = np.linalg.qr(draw.normal(0, 1, (rows, count)))[0]
    right = np.linalg.qr(draw.normal(0, 1, (columns, count)))[0]
    sizes = first * factor ** np.arange(count)
    return ((left * sizes) @ right.T + draw.normal(0, noise, (rows, columns))).astype(np.float32)


@pytest.mark.parametrize(
    ("first", "factor", "noise", "room"),
    [(4000, 0.9, 0.1, 1.05), (150, 0.98, 0.2, 1.05), (60, 0.995, 0.5, 1.05)],
)
@pytest.mark.parametrize("shape", [(60, 200), (200, 60), (5, 5), (300, 2000)])
def test_what_products_leave_is_hardly_more_than_the_best_of_so_many(shape, first, factor, noise, room):
    matrix = decaying(*shape, first, factor, noise)
    found = products_of(matrix, None, 255)
    left_over = matrix.copy()
    for part, steps in sum_of(found, *shape) if found else ():
        left_over.reshape(-1)[part] -= steps
    beyond = np.square(np.linalg.svd(matrix, compute_uv=False)[len(found) :])
    rounding = len(found) * sum(shape) / 12 * 1.5  # a twelfth for each number; more as half of one is 0
    assert np.square(left_over).sum() < room * beyond.sum() + rounding
    assert (beyond < 1.3 * 0.25 * sum(shape)).all(), "some that would have paid are not there"


def test_no_more_than_asked_for_and_none_where_there_is_nothing():
    matrix = decaying(100, 100)
    assert [len(products_of(matrix, None, most)) for most in (1, 7, 20)] == [1, 7, 20]
    assert products_of(np.zeros((30, 40), np.float32), None, 9) == []
    assert products_of(np.full((30, 40), 0.1, np.float32), None, 9) == []


def test_products_of_whole_numbers_are_the_same_in_any_order():
    matrix, columns = decaying(700, 300), drawn(4).normal(0, 1, (300, 20))
    order = drawn(5).permutation(300)
    found = WholeMatrix(matrix).times(columns)
    np.testing.assert_allclose(found, matrix.astype(np.float64) @ columns, rtol=1e-3, atol=1e-2)
    shuffled = WholeMatrix(np.ascontiguousarray(matrix[:, order])).times(columns[order])
    assert np.array_equal(found, shuffled)
    there = WholeMatrix(matrix).transposed_times(found)
    rows = drawn(6).permutation(700)
    assert np.array_equal(there, WholeMatrix(matrix[rows]).transposed_times(found[rows]))
    assert np.array_equal(gram(found), gram(found[rows]))
    tall = drawn(7).normal(0, 1, (100_000, 3))
    assert np.array_equal(gram(tall), gram(tall[::-1].copy()))
    expected = found @ gram(found)
    assert np.abs(product(found, gram(found)) - expected).max() < 1e-4 * np.abs(expected).max()


def test_bits_do_not_depend_on_how_many_threads_multiply():
    digests = set()
    for threads in ("1", "2", "7"):
        settings = {f"{library}_NUM_THREADS": threads for library in ("OMP", "OPENBLAS", "MKL")}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1
    assert len(digests.pop()) == hashlib.sha256().digest_size * 2
