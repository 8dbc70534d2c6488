"""Masks: exact top-k against a naive ranking, budgets per layer, soft forms with an exact mean, descriptions."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import optimize

from pacprune.kernels.law import bounded
from pacprune.masking import masks
from pacprune.masking.masks import entropy, overlap, top_k

ETA = 1e-5


def random_scores(rng: np.random.Generator, *, levels: int | None = None) -> dict[str, torch.Tensor]:
    """One to five tensors of one to four dimensions; `levels` limits the distinct values, so that there are ties."""
    scores = {}
    for i in range(int(rng.integers(1, 6))):
        shape = tuple(rng.integers(1, 8, size=int(rng.integers(1, 5))))
        values = rng.standard_normal(shape) if levels is None else rng.integers(0, levels, shape)
        scores[f"w{i}"] = torch.from_numpy(np.asarray(values, dtype=np.float32))
    return scores


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_threshold_has_exactly_k_scores_above_it(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(3, n, generator=generator).mul_(10).to(device) for n in (1, 1000, 20_000)]
    flat = torch.cat(scores, dim=1)
    for density in (0.0, 1e-4, 0.01, 0.3, 0.999, 1.0):
        tau = masks.threshold(scores, density, members=True)
        assert tau.dtype == torch.float32
        assert ((flat > tau[:, None]).sum(1) == round(density * 21_001)).all()
        for k in range(3):
            assert torch.equal(masks.threshold([s[k] for s in scores], density), tau[k])
    own = torch.tensor([0.1, 0.2, 0.3], device=device)
    tau = masks.threshold(scores, own, members=True)
    assert (flat > tau[:, None]).sum(1).tolist() == [2100, 4200, 6300]
    kept = torch.tensor([2100, 4200, 6300], device=device)
    assert torch.equal(masks._edge_by_bits(flat, kept, None), tau)
    alike = SimpleNamespace(sum=lambda count: 2 * count)  # two ranks with the same rows
    assert torch.equal(masks._edge_by_bits(flat, 2 * kept, alike), tau)
    assert float(masks.threshold([flat], 1.0)) == -1e9  # below all of them, and finite
    level = torch.tensor([1.0, 2.0, 2.0, 2.0, -0.0, 0.0], device=device)
    assert float(masks.threshold([level], 0.5)) == 1.0
    assert float(masks.threshold([level], 1 / 3)) == 2.0  # equal scores: fewer than asked for


def counts(mask: dict[str, torch.Tensor]) -> list[int]:
    return [int(m.sum()) for m in mask.values()]


def naive(score: np.ndarray, tie: np.ndarray, k: int) -> np.ndarray:
    """The k first in the order (score down, tie down, position up)."""
    keep = np.zeros(score.size, dtype=bool)
    keep[np.lexsort((np.arange(score.size), -tie, -score))[:k]] = True
    return keep


def clipped_shares(weight: np.ndarray, floors: np.ndarray, sizes: np.ndarray, k: int) -> np.ndarray:
    """clip(c * weight, floors, sizes) with the c that makes the sum k."""
    level = optimize.brentq(lambda c: np.clip(c * weight, floors, sizes).sum() - k, 0, max(sizes) + 1)
    return np.clip(level * weight, floors, sizes)


@pytest.mark.parametrize("scope", ["global", "layer", "erk"])
@pytest.mark.parametrize("levels", [None, 1, 3])
def test_exactly_k_are_kept_and_agree_with_a_naive_ranking(scope, levels):
    rng = np.random.default_rng(0)
    for _ in range(60):
        scores = random_scores(rng, levels=levels)
        ties = {name: torch.from_numpy(rng.integers(0, 3, s.shape)) for name, s in scores.items()}
        size = sum(s.numel() for s in scores.values())
        sparsity = float(rng.choice([0.0, 0.5, 0.9, 0.99, 1 - 1 / size, rng.random()]))
        k = round((1 - sparsity) * size)
        mask = top_k(scores, sparsity=sparsity, scope=scope, ties=ties)
        assert sum(counts(mask)) == k
        assert {n: (m.shape, m.dtype) for n, m in mask.items()} == {n: (s.shape, torch.bool) for n, s in scores.items()}
        groups = [list(scores)] if scope == "global" else [[name] for name in scores]
        for names in groups:
            score, tie, keep = (
                np.concatenate([part[n].reshape(-1).numpy() for n in names]) for part in (scores, ties, mask)
            )
            assert np.array_equal(keep, naive(score.astype(float), tie, int(keep.sum())))


def test_equal_scores_are_kept_by_position():
    mask = top_k({"b": torch.ones(2, 2), "a": torch.ones(3, 2)}, sparsity=0.5)
    assert mask["b"].all()
    assert mask["a"].reshape(-1).tolist() == [True, False, False, False, False, False]


def test_infinite_scores_rank_at_the_ends():
    inf = float("inf")
    scores = {"a": torch.tensor([-inf, 0.0, inf, -inf]), "b": torch.tensor([inf, -1.0, -inf, inf])}
    indices = [
        torch.cat(list(top_k(scores, sparsity=1 - k / 8).values())).nonzero().flatten().tolist() for k in (2, 4, 6)
    ]
    assert indices == [[2, 4], [1, 2, 4, 7], [0, 1, 2, 4, 5, 7]]


@pytest.mark.parametrize("scope", ["global", "layer", "erk"])
def test_float64_scores_are_ranked_in_float64(scope):
    tiny = 1 + torch.arange(6, dtype=torch.float64) * 1e-12
    assert top_k({"a": tiny}, sparsity=0.5, scope=scope)["a"].tolist() == [False] * 3 + [True] * 3
    huge = top_k({"a": tiny * 1e200, "b": torch.zeros(2)}, sparsity=0.75, scope=scope)
    assert huge["a"][-1]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.bfloat16])
def test_other_types_of_scores_are_ranked_too(dtype):
    for scope in ("global", "layer"):
        mask = top_k({"a": torch.tensor([0, 1, 1, 0]).to(dtype)}, sparsity=0.5, scope=scope)
        assert mask["a"].tolist() == [False, True, True, False]


@pytest.mark.parametrize("scope", ["global", "layer", "erk"])
def test_every_layer_keeps_its_minimum(scope):
    rng = np.random.default_rng(1)
    for _ in range(60):
        scores = random_scores(rng, levels=4)
        sizes = [s.numel() for s in scores.values()]
        least = int(rng.integers(0, 5))
        floors = [min(least, n) for n in sizes]
        k = int(rng.integers(max(1, sum(floors)), sum(sizes) + 1))
        mask = top_k(scores, sparsity=1 - k / sum(sizes), scope=scope, min_per_layer=least)
        assert sum(counts(mask)) == k
        assert all(c >= f for c, f in zip(counts(mask), floors, strict=True))
        for name, keep in mask.items():  # the best of each tensor, whatever its number
            assert np.array_equal(
                keep.reshape(-1).numpy(),
                naive(scores[name].reshape(-1).numpy(), np.zeros(keep.numel()), int(keep.sum())),
            )


def test_the_minimum_takes_from_the_weakest_of_the_others():
    scores = {"a": torch.tensor([9.0, 8, 7, 6]), "b": torch.tensor([1.0, 2, 3, 4])}
    mask = top_k(scores, sparsity=0.5, min_per_layer=1)
    assert [m.tolist() for m in mask.values()] == [[1, 1, 1, 0], [0, 0, 0, 1]]


def test_layer_and_erk_budgets_are_proportional_within_their_ranges(at_full_size: bool):
    rng = np.random.default_rng(2)
    for _ in range(5000 if at_full_size else 200):
        shapes = [tuple(rng.integers(1, 30, size=int(rng.integers(2, 4)))) for _ in range(int(rng.integers(1, 6)))]
        scores = {str(i): torch.rand([int(n) for n in shape]) for i, shape in enumerate(shapes)}
        sizes = np.array([math.prod(shape) for shape in shapes])
        least = int(rng.integers(0, 6))
        floors = np.minimum(sizes, least)
        k = int(rng.integers(max(1, floors.sum()), sizes.sum() + 1))
        for scope, weight in (("layer", sizes), ("erk", np.array([sum(shape) for shape in shapes]))):
            mask = top_k(scores, sparsity=1 - k / sizes.sum(), scope=scope, min_per_layer=least)
            ideal = clipped_shares(weight, floors, sizes, k)
            assert np.abs(counts(mask) - ideal).max() < 1 + 1e-6


def test_every_row_keeps_the_same_number_or_one_more():
    rng = np.random.default_rng(3)
    for levels in (None, 3) * 30:
        scores = random_scores(rng, levels=levels)
        ties = {name: torch.from_numpy(rng.integers(0, 3, s.shape)) for name, s in scores.items()}
        size = sum(s.numel() for s in scores.values())
        sparsity = float(rng.choice([0.0, 0.5, 0.9, rng.random()]))
        by_layer = top_k(scores, sparsity=sparsity, scope="layer")
        mask = top_k(scores, sparsity=sparsity, scope="row", ties=ties)
        assert sum(counts(mask)) == round((1 - sparsity) * size)
        assert counts(mask) == counts(by_layer)
        for name, keep in mask.items():
            rows = keep.reshape(len(keep), -1)
            sums, base = rows.sum(1), int(keep.sum()) // len(keep)
            assert set(sums.tolist()) <= {base, base + 1}
            nexts = []
            for score, tie, row in zip(scores[name], ties[name], rows, strict=True):
                score, tie = score.reshape(-1).numpy().astype(float), tie.reshape(-1).numpy()
                assert np.array_equal(row.numpy(), naive(score, tie, int(row.sum())))
                order = np.lexsort((np.arange(score.size), -tie, -score))
                nexts.append((score[order[base]], tie[order[base]]) if base < score.size else (-np.inf, 0))
            ranking = sorted(range(len(rows)), key=lambda r: (-nexts[r][0], -nexts[r][1], r))
            assert sorted(ranking[: int(keep.sum()) - base * len(rows)]) == (sums > base).nonzero().flatten().tolist()


def test_rows_can_have_the_sparsity_of_their_layer():
    scores = {"a": torch.rand(4, 8), "b": torch.rand(2, 3, 2)}
    mask = top_k(scores, sparsity={"a": 0.5, "b": 0.75}, scope="row")
    assert mask["a"].sum(1).tolist() == [4] * 4
    assert mask["b"].flatten(1).sum(1).tolist() in ([1, 2], [2, 1])
    assert top_k(scores, sparsity=0.5, scope="row", min_per_layer=7)["b"].sum() == 7


def test_erk_gives_small_layers_a_higher_density():
    scores = {"wide": torch.rand(100, 100), "conv": torch.rand(8, 4, 3, 3), "tiny": torch.rand(5, 2)}
    counts_per_layer = counts(top_k(scores, sparsity=0.9, scope="erk"))
    assert counts_per_layer[2] == 10  # would get more than it has: full
    assert counts_per_layer[0] / counts_per_layer[1] == pytest.approx(200 / 18, abs=0.05)


def test_total_counts_the_weights_that_are_never_pruned():
    scores = {"a": torch.arange(80.0)}
    mask = top_k(scores, sparsity=0.5, total=100)
    assert counts(mask) == [30]  # 50 of 100 zeros, all of them here
    assert counts(top_k(scores, sparsity=0.8, total=100)) == [0]
    with pytest.raises(ValueError, match=r"sparsity 0\.9 of 100 weights needs 90 zeros, but only 80 may be pruned"):
        top_k(scores, sparsity=0.9, total=100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity 1\.0 is outside \[0, 1\)"),
        ({"sparsity": -0.1}, r"sparsity -0\.1 is outside"),
        ({"sparsity": float("nan")}, "sparsity nan is outside"),
        ({"sparsity": 0.5, "scope": "line"}, "scope 'line' is unknown; use one of global, layer, row, erk"),
        ({"sparsity": 0.5, "min_per_layer": 3}, r"min_per_layer=3 needs 6 kept weights, but sparsity 0\.5 keeps 4"),
        ({"sparsity": 0.5, "min_per_layer": -1}, "min_per_layer is -1"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        top_k({"a": torch.rand(4), "b": torch.rand(4)}, **arguments)


def test_bad_scores_are_refused():
    with pytest.raises(ValueError, match="the scores of b hold 2 NaN of 3"):
        top_k({"a": torch.ones(2), "b": torch.tensor([math.nan, 1.0, math.nan])}, sparsity=0.5)
    with pytest.raises(ValueError, match="nothing to prune"):
        top_k({}, sparsity=0.5)


LOGITS = {
    "spread": lambda n, g: torch.randn(n, generator=g),
    "wide": lambda n, g: 20 * torch.randn(n, generator=g),
    "equal": lambda n, g: torch.full((n,), 5.3),
    "two values": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.1, 9.2, -9.2),
    "far apart": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.5, 60.0, -60.0),
    "coupled": lambda n, g: 4 * torch.log(torch.randn(n, generator=g).abs() + 1e-8),
}


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_shift_makes_the_mean_exact(kind, sharpness):
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 7, 1000, 20_000):
        logits = LOGITS[kind](n, generator)
        last = None
        for density in (1e-6, 1e-4, 0.02, 0.1, 0.5, 0.9, 0.999, 1 - 1e-6):
            for start in (None, last, 1e6, -1e6):
                tau = masks.logit_shift([logits[: n // 2], logits[n // 2 :]], density, sharpness=sharpness, start=start)
                p = torch.sigmoid(bounded(sharpness * (logits - tau)).double())
                assert float(p.mean()) <= density
                # A step of tau in float32 moves p by at most sharpness / 4 times that.
                step = float(np.spacing(np.float32(abs(float(tau)))))
                assert float(p.mean()) == pytest.approx(density, abs=max(1e-6, sharpness / 4 * step + 5e-7))
            last = tau


def test_shift_does_what_bounded_logits_can():
    tau = masks.logit_shift([torch.randn(100)], 1e-9)
    p = torch.sigmoid(bounded(torch.randn(100) - tau).double())
    assert float(p.mean()) == pytest.approx(float(torch.sigmoid(torch.tensor(-14.0))), rel=0.1)


def members_of(kinds: dict, n: int) -> torch.Tensor:
    """[members, n]: one of every kind."""
    generator = torch.Generator().manual_seed(0)
    return torch.stack([make(n, generator) for make in kinds.values()])


@pytest.mark.parametrize("n", [7, 200, 60_000])
def test_members_are_shifted_as_if_each_were_alone(n):
    logits = members_of(LOGITS, n)
    rows = len(logits)
    density, sharpness = torch.linspace(0.02, 0.9, rows).double(), torch.linspace(1.0, 4.0, rows)
    parts = [logits[:, :3].reshape(rows, 3, 1), logits[:, 3:]]
    tau = masks.logit_shift(parts, density, sharpness=sharpness, members=True)
    assert tau.shape == (rows,)
    assert tau.dtype == torch.float32
    for k in range(rows):
        alone = masks.logit_shift([logits[k]], float(density[k]), sharpness=float(sharpness[k]))
        assert alone.shape == ()
        means = [float(torch.sigmoid(bounded(sharpness[k] * (logits[k] - t)).double()).mean()) for t in (alone, tau[k])]
        step = float(sharpness[k]) / 4 * float(np.spacing(np.float32(abs(float(alone)))))
        assert means[1] <= float(density[k])
        assert means[0] == pytest.approx(means[1], abs=step + 2.5e-7)
    once = masks.logit_shift(parts, 0.1, sharpness=2.0, start=0.5, members=True)
    for k in range(rows):
        assert float(once[k]) == pytest.approx(
            float(masks.logit_shift([logits[k]], 0.1, sharpness=2.0)), rel=1e-5, abs=1e-5
        )


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_a_shift_that_does_not_wait_follows_the_last_one(kind, sharpness):
    generator = torch.Generator().manual_seed(0)
    logits = LOGITS[kind](20_000, generator)
    for density in (0.02, 0.1, 0.5, 0.9):
        exact_shift = masks.logit_shift([logits], density, sharpness=sharpness)
        for moved in (-0.3, -1e-3, 0.0, 1e-3, 0.3):
            unseen = masks.logit_shift([logits], density, sharpness=sharpness, start=exact_shift + moved, wait=False)
            p, q = (torch.sigmoid(bounded(sharpness * (logits - t)).double()).mean() for t in (unseen, exact_shift))
            step = float(np.spacing(np.float32(abs(float(exact_shift)))))
            assert float(p) <= density
            assert float(p) == pytest.approx(float(q), abs=max(1e-6 * density, sharpness / 4 * step + 2.5e-7))


def test_a_shift_that_does_not_wait_is_never_worse_than_the_last_one():
    generator = torch.Generator().manual_seed(0)
    logits = 1e3 * torch.randn(1000, generator=generator) ** 3
    for density in (0.01, 0.3, 0.99):
        for start in (-1e6, -3.0, 5e3):
            tau = masks.logit_shift([logits], density, start=start, wait=False)
            first, last = (float(torch.sigmoid(bounded(logits - t)).mean()) for t in (torch.tensor(start), tau))
            assert abs(math.log(last / (1 - last) * (1 - density) / density)) <= 1e-3 + abs(
                math.log(first / (1 - first) * (1 - density) / density)
            )


PROBABILITIES = {
    "unit": lambda n, g: torch.rand(n, generator=g),
    "outside": lambda n, g: 3 * torch.randn(n, generator=g),
    "huge": lambda n, g: 1e6 * torch.randn(n, generator=g),
    "equal": lambda n, g: torch.full((n,), 0.3),
    "at the ends": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.1, 1 - ETA, ETA),
    "far off": lambda n, g: torch.full((n,), -70.0),
}


@pytest.mark.parametrize("kind", PROBABILITIES)
def test_projection_is_exact_and_meets_the_conditions_of_optimality(kind):
    generator = torch.Generator().manual_seed(0)
    for n in (1, 2, 7, 1000, 20_000):
        x = PROBABILITIES[kind](n, generator)
        for density in (ETA, 1e-3, 0.02, 0.1, 0.5, 0.9, 0.999, 1 - ETA):
            parts = masks.project([x[: n // 3], x[n // 3 :]], density, eta=ETA)
            p = torch.cat(parts).double()
            assert float(p.mean()) == pytest.approx(density, abs=1e-7)
            assert float(p.min()) > ETA - 1e-7
            assert float(p.max()) < 1 - ETA + 1e-7
            # x - p is one multiplier inside the box, at least it at the top and at most it at the bottom.
            moved, top, bottom = x.double() - p, p > 1 - ETA - 1e-7, p < ETA + 1e-7
            inside = moved[~top & ~bottom]
            if len(inside):
                assert float(inside.max() - inside.min()) < 1e-6
                assert not (top.any() and float(moved[top].min()) < float(inside.min()) - 1e-6)
                assert not (bottom.any() and float(moved[bottom].max()) > float(inside.max()) + 1e-6)


def test_projection_equals_a_quadratic_programme():
    rng = np.random.default_rng(0)
    for _ in range(5):
        x, density = rng.random(6), float(rng.uniform(0.05, 0.95))
        solved = optimize.minimize(
            lambda p, x=x: 0.5 * ((p - x) ** 2).sum(),
            np.full(6, density),
            jac=lambda p, x=x: p - x,
            bounds=[(ETA, 1 - ETA)] * 6,
            constraints={"type": "eq", "fun": lambda p, d=density: p.mean() - d, "jac": lambda p: np.full(6, 1 / 6)},
            tol=1e-12,
        )
        projected = masks.project([torch.from_numpy(x)], density, eta=ETA)[0].numpy()
        assert np.abs(projected - solved.x).max() < 1e-5


def test_projection_does_not_change_a_point_that_meets_the_budget():
    p = torch.tensor([0.25, 0.5, 0.75, 0.5])
    assert torch.equal(masks.project([p], 0.5, eta=ETA)[0], p)


def test_members_are_projected_independently():
    x = members_of(PROBABILITIES, 500)
    density = torch.linspace(0.02, 0.9, len(x)).double()
    parts = [x[:, :20].reshape(-1, 4, 5), x[:, 20:]]
    for wait in (True, False):
        projected = masks.project(parts, density, eta=ETA, members=True, wait=wait)
        assert [f.shape for f in projected] == [p.shape for p in parts]
        for k, target in enumerate(density.tolist()):
            alone = torch.cat([p.reshape(-1) for p in masks.project([p[k] for p in parts], target, eta=ETA)])
            row = torch.cat([f[k].reshape(-1) for f in projected])
            # Without waiting there are 40 bisections, which leave values of 1e6 accurate to 1e-5.
            assert torch.allclose(row, alone, rtol=0, atol=1e-6 if wait else 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_shift_and_project_without_waiting_can_be_captured_in_a_cuda_graph():
    x = torch.randn(3, 40, 50, device="cuda")
    density, sharpness = torch.tensor([0.1, 0.5, 0.9], device="cuda"), torch.ones(3, device="cuda")
    expected = masks.logit_shift([x], density, sharpness=sharpness, members=True)
    start = expected + 0.05

    def shift_and_project() -> tuple[torch.Tensor, torch.Tensor]:
        tau = masks.logit_shift([x], density, sharpness=sharpness, start=start, members=True, wait=False)
        return tau, masks.project([torch.sigmoid(x)], density, eta=ETA, members=True, wait=False)[0]

    shift_and_project()
    torch.cuda.set_sync_debug_mode("error")
    try:
        shift_and_project()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tau, projected = shift_and_project()
    graph.replay()
    assert torch.allclose(tau, expected, atol=1e-5)
    assert torch.allclose(projected.double().mean((1, 2)), density.double(), atol=1e-6)


def test_density_of_a_part_accounts_for_the_weights_that_are_never_pruned():
    assert masks.density(0.5, size=80, total=100) == pytest.approx(30 / 80)
    with pytest.raises(ValueError, match=r"sparsity 0\.9 of 100 weights cannot be met by pruning 80 of them"):
        masks.density(0.9, size=80, total=100)


def test_overlap_comes_with_its_chance_level():
    a = {"w": torch.tensor([1, 1, 0, 0, 0, 0]).bool(), "v": torch.tensor([1, 1]).bool()}
    b = {"w": torch.tensor([1, 0, 1, 1, 0, 0]).bool(), "v": torch.tensor([1, 0]).bool()}
    assert overlap(a, b) == (2 / 4, 4 / 8)
    assert overlap(a, a) == (1.0, 0.5)
    generator = torch.Generator().manual_seed(0)
    first, second = ({"w": torch.rand(200_000, generator=generator) < 0.1} for _ in range(2))
    result = overlap(first, second)
    assert result.shared == pytest.approx(result.chance, abs=0.01)
    assert result.chance == pytest.approx(0.1, abs=0.01)
    with pytest.raises(ValueError, match="different tensors: only one of them has v; make both"):
        overlap(a, {"w": b["w"]})


def test_entropy_is_the_mean_over_all_weights_and_sparsity_the_share_of_zeros():
    assert entropy({"w": torch.tensor([0.0, 1.0]), "v": torch.tensor([1.0])}) == 0
    assert entropy({"w": torch.full((3, 2), 0.5)}) == pytest.approx(math.log(2))
    p = 0.1
    expected = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert entropy({"w": torch.tensor([p, 1.0])}) == pytest.approx(expected / 2, rel=1e-6)
    assert masks.sparsity({"w": torch.tensor([1, 0, 0]).bool(), "v": torch.tensor([1]).bool()}) == 0.5


def test_a_mapping_gives_every_tensor_the_sparsity_of_the_first_pattern_that_fits() -> None:
    g = torch.Generator().manual_seed(0)
    scores = {name: torch.rand(10, 10, generator=g) for name in ("conv1.weight", "conv2.weight", "fc.weight", "rest")}
    mask = masks.top_k(scores, sparsity={"conv1": 0.2, "conv*": 0.5, "fc.weight": 0.9})
    assert [int(keep.sum()) for keep in mask.values()] == [80, 50, 10, 100]
    for name, keep in mask.items():
        assert keep.all() or scores[name][keep].min() > scores[name][~keep].max()
    assert int(masks.top_k(scores, sparsity={"fc": 0.99}, min_per_layer=4)["fc.weight"].sum()) == 4
    with pytest.raises(
        ValueError, match=r"sparsity names 'head', which fits none of the 4 weights; they are conv1\.weight"
    ):
        masks.top_k(scores, sparsity={"head": 0.5})
    with pytest.raises(ValueError, match="sparsity has 1 names of tensors and pattern is '2:4'"):
        masks.top_k(scores, sparsity={"fc": 0.5}, pattern="2:4")
