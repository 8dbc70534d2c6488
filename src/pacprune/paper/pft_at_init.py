"""PFT at initialisation: masks are learned on weights that were never trained, and beside it one-shot pruning there.

The paper's figure of MNIST, Fashion-MNIST (MLP 1000x3) and CIFAR-10 (ResNet20) without a dense network to start from.
"""

from collections.abc import Iterator
from dataclasses import replace

from pacprune.paper import comparison, pft_vs_osp
from pacprune.paper.comparison import Contest
from pacprune.paper.frame import Figure, Job, Setting
from pacprune.training.config import Config


def _at_init(setting: Setting[Contest]) -> Setting[Contest]:
    """The same contest at 90 to 98 % without tuning. The epochs of dense training are added to those of pruning."""
    criteria = setting.options.criteria
    return setting.changed(
        sparsities=tuple(sparsity for sparsity in setting.sparsities if 0.9 <= sparsity <= 0.98),
        criteria=tuple(criterion for criterion in criteria if criterion in ("magnitude", "snip", "random")),
        methods=("osp", "pft"),
        seeds=3,
        rates=(0.1,),
        gated=((0.1, 100.0),),
        dense=Config(epochs=0),
        pruning=replace(setting.pruning, epochs=setting.dense.epochs + setting.pruning.epochs),
    )


SETTINGS = {
    scale: tuple(_at_init(setting) for setting in settings if setting.model != "lenet5")
    for scale, settings in pft_vs_osp.SETTINGS.items()
}


def figures(setting: Setting[Contest], job: Job) -> Iterator[Figure]:
    """Test error against sparsity, and how far PFT is below one-shot pruning from the same criterion."""
    epochs = setting.pruning.epochs
    yield Figure(
        f"pft-at-init-{setting.name}",
        f"{setting.data}, {setting.model}: test error without dense training, {epochs} epochs in all; one-shot masks "
        "are those of initialisation, PFT learns its own meanwhile; "
        f"mean and 95 % interval over {setting.seeds} seeds (weights, data order and masks are random).",
        lambda: comparison.run(setting, job),
        pft_vs_osp.paint_criteria,
        lambda rows: pft_vs_osp.margins(setting, rows),
    )
