"""PFT at initialisation: masks are learned on weights that were never trained, and beside it one-shot pruning there.

The paper's figure of MNIST, Fashion-MNIST (MLP 1000x3) and CIFAR-10 (ResNet20) without a dense network to start from.
"""

from dataclasses import replace
from typing import Any

from pacprune.paper import comparison, frame, pft_vs_osp
from pacprune.paper.comparison import Setting
from pacprune.paper.frame import Drawn, Job
from pacprune.training.config import Config


def _at_init(setting: Setting) -> Setting:
    """The same contest at 90 to 98 %, without tuning and dense training, whose epochs are added to what comes after."""
    epochs = setting.dense.epochs + setting.after.epochs
    criteria = tuple(criterion for criterion in setting.criteria if criterion in ("magnitude", "snip", "random"))
    return replace(
        setting,
        sparsities=tuple(sparsity for sparsity in setting.sparsities if 0.9 <= sparsity <= 0.98),
        criteria=criteria,
        methods=("osp", "pft"),
        seeds=3,
        rates=(0.1,),
        gated=((0.1, 100.0),),
        dense=Config(epochs=0),
        after=replace(setting.after, epochs=epochs),
    )


SETTINGS = {
    scale: tuple(_at_init(one) for one in found if one.model != "lenet5")
    for scale, found in pft_vs_osp.SETTINGS.items()
}


def reproduce(job: Job) -> tuple[list[Drawn], dict[str, Any]]:
    """A figure and a CSV per data set, and how far PFT is below one-shot pruning from the same criterion."""
    drawn, numbers = [], {}
    for setting in job.chosen(SETTINGS[job.scale]):
        setting = comparison.on_device(setting, job)
        epochs = setting.after.epochs
        caption = (
            f"{setting.data}, {setting.model}: test error without dense training, {epochs} epochs in all; one-shot "
            f"masks are those of initialisation, PFT has {round(epochs * setting.mask_share)} epochs to learn its own; "
            f"mean and 95 % interval over {setting.seeds} seeds (weights, data order and masks are random)."
        )
        name = f"pft-at-init-{setting.name}"
        found = frame.draw(
            job, name, caption, lambda setting=setting: comparison.run(setting, job), pft_vs_osp.paint_criteria
        )
        drawn.append(found)
        numbers |= pft_vs_osp.margins(setting, found.rows)
    return drawn, numbers
