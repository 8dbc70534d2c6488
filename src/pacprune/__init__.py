"""pacprune: learn pruning masks, and prove how good the pruned network is.

    import pacprune as pp

The nouns are scores, masks, SpikeSlab, Split, Config and Certificate; the rest are verbs. See docs/ for a tutorial.
"""

import sys

from pacprune import bounds, data, models
from pacprune._version import __version__ as __version__
from pacprune.certification.audit import verify
from pacprune.certification.certificate import Certificate
from pacprune.certification.certify import certify, certify_held_out
from pacprune.certification.commitment import Commitment, commit
from pacprune.certification.monitor import Monitor
from pacprune.deploy import export, slim
from pacprune.distributed import ranks
from pacprune.masking import criteria as scores
from pacprune.masking import patterns
from pacprune.masking.attachment import attach, harden, read, resample_
from pacprune.masking.masks import entropy, overlap, top_k
from pacprune.masking.spikeslab import SpikeSlab, block_isotropic, isotropic, kl, score_monotone
from pacprune.masking.weights import apply_mask, prunable, sparsity
from pacprune.methods.acdc import acdc
from pacprune.methods.feather import feather
from pacprune.methods.gradual import gmp
from pacprune.methods.iterative import imp
from pacprune.methods.l0 import l0
from pacprune.methods.one_shot import osp
from pacprune.methods.pbp import pbp
from pacprune.methods.pft import pft
from pacprune.methods.pipeline import Certified, Pruned, together
from pacprune.methods.probmask import probmask
from pacprune.methods.rigl import rigl
from pacprune.methods.str_ import str_
from pacprune.theory import linear
from pacprune.theory import linearised as wide
from pacprune.training.budget import Budget
from pacprune.training.config import Config
from pacprune.training.evaluate import error, gibbs_error, reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.training.posterior import bounded_cross_entropy, fit_posterior

__all__ = [
    "Budget",
    "Certificate",
    "Certified",
    "Commitment",
    "Config",
    "Monitor",
    "Pruned",
    "SpikeSlab",
    "acdc",
    "apply_mask",
    "attach",
    "block_isotropic",
    "bounded_cross_entropy",
    "bounds",
    "certify",
    "certify_held_out",
    "commit",
    "data",
    "entropy",
    "error",
    "export",
    "feather",
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
    "patterns",
    "pbp",
    "pft",
    "probmask",
    "prunable",
    "ranks",
    "read",
    "reestimate_batchnorm",
    "resample_",
    "rigl",
    "score_monotone",
    "scores",
    "slim",
    "sparsity",
    "str_",
    "together",
    "top_k",
    "verify",
    "wide",
]


# `import pacprune.linear` and the like, whatever folder a public module lies in.
for _name, _module in {
    "export": export,
    "linear": linear,
    "patterns": patterns,
    "ranks": ranks,
    "scores": scores,
    "slim": slim,
    "wide": wide,
}.items():
    sys.modules[f"{__name__}.{_name}"] = _module


def __dir__() -> list[str]:
    """The public names: what the folders hold beside them is private."""
    return sorted([*__all__, "__version__"])
