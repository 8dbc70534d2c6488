"""The public names, which are those of `pacprune`: it imports this file when the first of them is used."""

from pacprune import bounds, data, models
from pacprune.certification.audit import verify
from pacprune.certification.certificate import Certificate
from pacprune.certification.certify import certify
from pacprune.certification.choose import Choice, choose
from pacprune.certification.commitment import Commitment, commit
from pacprune.certification.held_out import certify_held_out
from pacprune.certification.monitor import Monitor
from pacprune.deploy import export, slim
from pacprune.distributed import ranks
from pacprune.masking import criteria as scores
from pacprune.masking import patterns
from pacprune.masking.attachment import attach, harden, read, resample_, unmasked
from pacprune.masking.masks import entropy, overlap, top_k
from pacprune.masking.spikeslab import SpikeSlab, block_isotropic, isotropic, kl, score_monotone
from pacprune.masking.weights import apply_mask, prunable, select, sparsity
from pacprune.methods.acdc import acdc
from pacprune.methods.compress import Compressed, compress
from pacprune.methods.feather import feather
from pacprune.methods.gradual import gmp
from pacprune.methods.iterative import imp
from pacprune.methods.l0 import l0
from pacprune.methods.layerwise import layerwise
from pacprune.methods.one_shot import osp
from pacprune.methods.pbp import pbp
from pacprune.methods.pft import pft
from pacprune.methods.pipeline import Certified, Pruned, together
from pacprune.methods.probmask import probmask
from pacprune.methods.pruner import Pruner
from pacprune.methods.rigl import rigl
from pacprune.methods.str_ import str_
from pacprune.methods.svd import svd
from pacprune.theory import linear
from pacprune.theory import linearised as wide
from pacprune.training.budget import Budget
from pacprune.training.carrier import keep_zeros
from pacprune.training.config import Config
from pacprune.training.evaluate import error, gibbs_error, reestimate_batchnorm
from pacprune.training.fit import fit
from pacprune.training.posterior import bounded_cross_entropy, fit_posterior

__all__ = [
    "Budget",
    "Certificate",
    "Certified",
    "Choice",
    "Commitment",
    "Compressed",
    "Config",
    "Monitor",
    "Pruned",
    "Pruner",
    "SpikeSlab",
    "acdc",
    "apply_mask",
    "attach",
    "block_isotropic",
    "bounded_cross_entropy",
    "bounds",
    "certify",
    "certify_held_out",
    "choose",
    "commit",
    "compress",
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
    "keep_zeros",
    "kl",
    "l0",
    "layerwise",
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
    "select",
    "slim",
    "sparsity",
    "str_",
    "svd",
    "together",
    "top_k",
    "unmasked",
    "verify",
    "wide",
]
