"""The paper's PFT as written: its constants, both protocols, and what is trained for every row."""

from collections import Counter
from typing import Any

import pytest

from pacprune.methods.pipeline import Pruned
from pacprune.paper import comparison, paper_pft
from pacprune.paper.comparison import Contest
from pacprune.paper.frame import Job, Setting

(SMOKE,) = paper_pft.SETTINGS["smoke"]
CONSTANTS = {
    "mnist-mlp": (0.01, "constant", 30, 30),
    "fashion-mnist-lenet5": (0.01, "constant", 70, 30),
    "fashion-mnist-mlp": (0.01, "constant", 70, 30),
    "cifar10-resnet20": (0.1, "step", 120, 60),
}


def mask_share(setting: Setting[Contest], name: str) -> float:
    return dict(setting.options.contender(name).options)["mask_share"]


def test_the_scale_paper_has_the_papers_constants() -> None:
    settings = {setting.name: setting for setting in paper_pft.SETTINGS["paper"]}
    assert settings.keys() == CONSTANTS.keys()
    for name, (lr, schedule, dense_epochs, mask_epochs) in CONSTANTS.items():
        setting, pruning = settings[name], settings[name].pruning
        assert (setting.dense.lr, setting.dense.schedule, setting.dense.epochs) == (lr, schedule, dense_epochs)
        assert (pruning.lr, pruning.schedule, pruning.epochs) == (lr, schedule, dense_epochs + mask_epochs)
        assert pruning.momentum == 0.9
        assert (pruning.batch_size, pruning.weight_decay) == (128, 0.0)
        assert round(mask_share(setting, "pft") * pruning.epochs) == mask_epochs
        assert setting.options.points("pft") == setting.options.points("osp") == ((lr, 1.0),)
        assert setting.options.criteria == ("magnitude", "snip", "random")


@pytest.mark.parametrize("scale", paper_pft.SETTINGS)
def test_tuning_has_as_many_points_for_all_and_the_papers_is_among_them(scale: str) -> None:
    for setting in paper_pft.SETTINGS[scale]:
        grids = {name: setting.options.points(name) for name in paper_pft.VARIANTS if name.endswith("-tuned")}
        assert {len(grid) for grid in grids.values()} == {len(setting.options.rates)}
        assert all((setting.dense.lr, 1.0) in grid for grid in grids.values())


def test_a_grid_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="pft-tuned would try 2 points of its grid and the others 3; give as many, or"):
        SMOKE.changed(grids={"pft-tuned": ((0.1, 1.0), (0.1, 10.0))})


def test_every_row_is_trained_as_its_columns_say(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: dict[str, Counter[str]] = {}
    rates: set[tuple[str, float]] = set()
    prune, together = comparison.prune, comparison.together

    def noting(setting: Any, entries: list[comparison.Entry], *args: Any, **options: Any) -> list[Pruned]:
        results = prune(setting, entries, *args, **options)
        trained[entries[0].method] = Counter(row["stage"] for row in results[0].history)
        return results

    def rating(verb: Any, nets: Any, train: Any, configs: Any, **options: Any) -> Any:
        rates.update((options.get("recipe", ""), config.gate_lr) for config in configs)
        return together(verb, nets, train, configs, **options)

    monkeypatch.setattr(comparison, "prune", noting)
    monkeypatch.setattr(comparison, "together", rating)
    tiny = SMOKE.changed(criteria=("random",), seeds=1)
    rows = paper_pft.run(tiny, job)
    assert {tuple(row) for row in rows} == {paper_pft.COLUMNS}
    pruned = [row for row in rows if row["method"] != "dense"]
    for name, row in zip(paper_pft.VARIANTS, pruned, strict=True):
        assert row["kept"] == 5020
        assert (row["mask_epochs"], row["tune_epochs"]) == (trained[name]["masks"], trained[name]["tune"])
    assert trained["osp"] == {"tune": 2}
    assert trained["osp-equal"] == {"tune": 3}
    assert trained["pft"] == {"masks": 1, "tune": 2}
    gates = sorted({rate for recipe, rate in rates if recipe == "paper"})
    assert gates == pytest.approx([0.1, 1.0, 10.0, 1000.0])  # a ratio of 100 is given, and not the recipe's default
    assert [row["gate_lr"] for row in pruned if row["protocol"] != paper_pft.BOTH] == [None] * 4
