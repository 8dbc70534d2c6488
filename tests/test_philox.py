"""The counter-based generator: published vectors, slicing, uniformity, independence, normals, permutations."""

import inspect

import numpy as np
import pytest
import torch
from scipy import stats

from pacprune import philox

N = 1 << 16


def reference(*, seed: int, step: int, stream: int, index: int) -> int:
    """One word in Python integers, straight from the definition of Philox4x32-10."""
    low = 0xFFFFFFFF
    c = [(index // 4) & low, (index // 4) >> 32, step & low, stream]
    k = [seed & low, (seed >> 32) & low]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & low, (p0 >> 32) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c[index % 4]


@pytest.mark.parametrize(
    ("counter", "key", "output"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_published_vectors_are_reproduced(counter, key, output):
    c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
    k0, k1 = (int(word, 16) for word in key.split())
    block = torch.from_numpy(np.array([c0 | c1 << 32], dtype=np.uint64).view(np.int64))
    words = philox._block(k0 | k1 << 32, c2, c3, block)
    assert [f"{int(word):08x}" for word in words] == output.split()


def test_words_follow_the_definition_at_any_seed_step_stream_and_index():
    rng = np.random.default_rng(0)
    for _ in range(40):
        seed, step = int(rng.integers(0, 2**63)), int(rng.integers(0, 2**32))
        stream, offset = int(rng.integers(0, 5)), int(2 ** rng.uniform(0, 50))
        words = philox.words(5, seed=seed, step=step, stream=stream, offset=offset).tolist()
        assert words == [reference(seed=seed, step=step, stream=stream, index=offset + i) for i in range(5)]


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 7, 2**34 - 3, 2**34 + 5])
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 9])
def test_a_slice_is_a_part_of_the_whole(n, offset):
    counter = {"seed": 7, "step": 3, "stream": philox.GATE}
    whole = philox.words(32, offset=offset - offset % 4, **counter)
    assert torch.equal(philox.words(n, offset=offset, **counter), whole[offset % 4 :][:n])
    normals = philox.normal(32, offset=offset - offset % 4, **counter)
    assert torch.equal(philox.normal(n, offset=offset, **counter), normals[offset % 4 :][:n])


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**62 + 12345, -1])
@pytest.mark.parametrize("step", [0, 1, 2**31, 2**32 - 1])
def test_tensors_and_integers_give_the_same_numbers(seed, step):
    integers = philox.words(17, seed=seed, step=step, stream=1, offset=2)
    tensors = philox.words(17, seed=torch.tensor(seed), step=torch.tensor(step), stream=1, offset=2)
    assert torch.equal(integers, tensors)


def test_words_fill_their_range_evenly():
    word = philox.words(N, seed=0, step=0, stream=0)
    assert word.dtype == torch.int64
    assert 0 <= int(word.min()) < 2**18
    assert 2**32 - 2**18 < int(word.max()) < 2**32
    for shift in (0, 8, 16, 24):  # every byte
        counts = torch.bincount((word >> shift) & 255, minlength=256)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3
    for lane in range(4):
        assert stats.chisquare(torch.bincount(word[lane::4] >> 24, minlength=256).numpy()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("first_change", "second_change"),
    [
        ({}, {"offset": 1}),
        ({}, {"offset": 2}),
        ({}, {"offset": 4}),
        ({}, {"step": 1}),
        ({}, {"step": 2**31}),
        ({}, {"seed": 1}),
        ({}, {"seed": 2**32}),
        ({}, {"stream": philox.SLAB}),
        ({"step": 1}, {"seed": 1}),
        ({"step": 1}, {"stream": 1}),
    ],
)
def test_neighbours_in_index_step_seed_and_stream_are_independent(first_change, second_change):
    base = {"seed": 0, "step": 0, "stream": philox.GATE}
    u, v = (philox.uniform(philox.words(N, **(base | change))) for change in (first_change, second_change))
    assert abs(np.corrcoef(u, v)[0, 1]) * N**0.5 < 4
    cells = torch.bincount((u * 16).long() * 16 + (v * 16).long(), minlength=256)
    assert stats.chisquare(cells.numpy()).pvalue > 1e-3


def test_uniform_is_strictly_inside_the_unit_interval():
    ends = philox.uniform(torch.tensor([0, 2**32 - 1]))
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]
    u = philox.uniform(philox.words(N, seed=5, step=0, stream=0))
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-3


def test_normals_are_normal_and_uncorrelated():
    z = philox.normal(4 * N, seed=1, step=2, stream=philox.SLAB).double()
    n = z.numel()
    assert torch.isfinite(z).all()
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((z**power).mean()) - moment) < 4 * (variance / n) ** 0.5
    assert 4 < float(z.abs().max()) < 6.7
    for f in (lambda t: t, lambda t: t**2):  # two normals share a radius; their squares must be uncorrelated too
        for lag in (1, 2, 4):
            assert abs(np.corrcoef(f(z[lag:]), f(z[:-lag]))[0, 1]) * n**0.5 < 4


def test_extreme_words_give_finite_normals(monkeypatch):
    ends = torch.tensor([0, 2**32 - 1])
    monkeypatch.setattr(philox, "_block", lambda *_: (ends, ends, ends.flip(0), ends))
    z = philox.normal(8, seed=0, step=0, stream=0)
    assert torch.isfinite(z).all()
    assert float(z.abs().max()) < 6.7


@pytest.mark.parametrize("n", [0, 1, 2, 10, 1797])
def test_a_permutation_holds_every_index_and_depends_on_the_seed(n):
    order = philox.permutation(n, seed=3)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(n))
    assert torch.equal(order, philox.permutation(n, seed=3))
    if n > 5:
        assert not torch.equal(order, philox.permutation(n, seed=4))


def test_every_place_of_a_permutation_is_uniform_over_seeds():
    many = torch.stack([philox.permutation(8, seed=seed) for seed in range(2000)])
    for place in range(8):
        assert stats.chisquare(torch.bincount(many[:, place], minlength=8).numpy()).pvalue > 1e-3


def test_a_permutation_takes_no_labels():
    assert list(inspect.signature(philox.permutation).parameters) == ["n", "seed"]
