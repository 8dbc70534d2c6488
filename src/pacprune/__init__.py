"""pacprune: learn pruning masks, and prove how good the pruned network is.

    import pacprune as pp

The nouns are scores, masks, SpikeSlab, Split, Config and Certificate; the rest are verbs. See docs/ for a tutorial.
"""

from pacprune import bounds, data, linear, models, scores, wide
from pacprune._version import __version__ as __version__
from pacprune.baselines import gmp, imp, l0
from pacprune.budget import Budget
from pacprune.certificate import Certificate
from pacprune.config import Config
from pacprune.evaluate import error, gibbs_error, reestimate_batchnorm
from pacprune.issue import certify, certify_held_out
from pacprune.layers import attach, harden, read, resample_
from pacprune.masks import entropy, overlap, top_k
from pacprune.pipelines import Certified, Pruned, osp, pbp, pft, together
from pacprune.recheck import verify
from pacprune.spikeslab import SpikeSlab, block_isotropic, isotropic, kl, score_monotone
from pacprune.train import fit, fit_posterior
from pacprune.weights import apply_mask, prunable, sparsity

__all__ = [
    "Budget",
    "Certificate",
    "Certified",
    "Config",
    "Pruned",
    "SpikeSlab",
    "apply_mask",
    "attach",
    "block_isotropic",
    "bounds",
    "certify",
    "certify_held_out",
    "data",
    "entropy",
    "error",
    "fit",
    "fit_posterior",
    "gibbs_error",
    "gmp",
    "harden",
    "imp",
    "isotropic",
    "kl",
    "l0",
    "linear",
    "models",
    "osp",
    "overlap",
    "pbp",
    "pft",
    "prunable",
    "read",
    "reestimate_batchnorm",
    "resample_",
    "score_monotone",
    "scores",
    "sparsity",
    "together",
    "top_k",
    "verify",
    "wide",
]
