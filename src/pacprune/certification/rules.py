"""What is refused, and why: every rule that a certificate rests on is one function that raises when it is broken."""

from itertools import combinations

import torch
from torch import nn

from pacprune.certification.bounds_table import FAMILIES, RISK_BOUNDS
from pacprune.data.splits import Split, check_split
from pacprune.masking import attachment, weights
from pacprune.masking.spikeslab import SpikeSlab
from pacprune.training.posterior import touched

# --- What is declared.


def check_declared(family: str, method: str, expected_risk: float | None) -> None:
    """Refuses an unknown declaration before anything is trained or drawn."""
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is unknown; declare one of {', '.join(FAMILIES)}")
    if method not in RISK_BOUNDS:
        raise ValueError(f"method {method!r} is unknown; use one of {', '.join(RISK_BOUNDS)}")
    if expected_risk is not None and not 0 < expected_risk < 1:
        raise ValueError(
            f"expected_risk is {expected_risk}; it must lie strictly between 0 and 1: give a fraction, or None for "
            "a constant that is chosen on a fixed grid and paid for"
        )


# --- The data.


def refuse_split(split: Split) -> None:
    """All rules about the data alone."""
    check_split(split)
    refuse_overlap(split)
    refuse_standardisation(split)


def refuse_overlap(split: Split) -> None:
    """The parts are disjoint: an example that shaped the prior tells nothing about new data."""
    for first, second in combinations((split.prior, split.bound, split.unlabelled), 2):
        shared = int(torch.isin(second.index, first.index).sum())
        if shared:
            raise ValueError(
                f"{first.name} and {second.name} share {shared} of {len(second)} examples; they must be disjoint"
            )


def refuse_standardisation(split: Split) -> None:
    """The inputs are standardised by the prior part: constants from elsewhere may have seen the bound set."""
    if not split.mean:
        return
    x, axes = split.prior.x, [axis for axis in range(split.prior.x.ndim) if axis != 1]
    mean, std = (t.reshape(-1) for t in (x.mean(axes, dtype=torch.float64), x.std(axes, correction=0)))
    # float32 leaves this much of a mean that is large beside its standard deviation; a constant channel has std 0.
    rounding = 1e-4 + 2e-7 * (torch.tensor(split.mean) / torch.tensor(split.std)).abs()
    wrong = (mean.abs() > rounding) | ((std - 1).abs() > rounding) & (std > rounding)
    for channel in wrong.nonzero().flatten().tolist():
        raise ValueError(
            f"the inputs are not standardised by the prior part, whose mean and std are {float(mean[channel]):.2g} "
            f"and {float(std[channel]):.4g} in channel {channel}, not 0 and 1; constants from elsewhere may have "
            "seen the bound set: use those of split.prior"
        )


# --- The networks.


def refuse_batch_statistics(model: nn.Module) -> None:
    """An answer depends on its own input alone: otherwise there is no network to certify."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"{name} uses batch statistics in evaluation (track_running_stats=False), so that an answer depends on "
                "its batch; give it running statistics"
            )


def refuse_random(model: nn.Module) -> None:
    """A held-out certificate is about one network, not about a distribution."""
    if attachment.sites(model):
        raise ValueError(
            "the model has stochastic masks; call pp.harden(model) first, or pp.certify for the random network"
        )


def refuse_seen_unlabelled(posterior: SpikeSlab, split: Split) -> None:
    """No fit has used the unlabelled inputs: Q and the thresholded network are compared on fresh ones."""
    count = touched(posterior.seen, split.unlabelled, apart_from=split.train)
    if count:
        raise ValueError(
            f"the posterior has seen {count} of the {len(split.unlabelled)} unlabelled inputs; "
            "no fit may use them: train on split.prior and split.bound alone, or split with unlabelled=0"
        )


def refuse_moved_rest(prior: SpikeSlab, posterior: SpikeSlab) -> None:
    """What is outside Q is as it was in P: the KL does not pay for anything else that moved."""
    for name in sorted(prior.rest.keys() | posterior.rest.keys()):
        values = [slab.rest[name].cpu() for slab in (prior, posterior) if name in slab.rest]
        if len(values) < 2 or not torch.equal(*values):
            raise ValueError(
                f"{name} lies outside Q but differs from its value in the prior; everything but Q must stay frozen"
            )


# --- The order in time.


def receipt(model: nn.Module, prior: SpikeSlab, split: Split) -> weights.Receipt:
    """What `fit_posterior` left on the model: it shows that this P was written before this bound set was read."""
    written = weights.notes(model).receipt
    if written is None:
        raise ValueError(
            "there is no receipt that the prior was written before the bound set was read; "
            "train Q with pp.fit_posterior (epochs=0 will do when Q = P)"
        )
    for what, noted, present in (
        ("prior", written["prior"], prior.hash),
        ("bound set", written["bound"], split.bound.hash),
    ):
        if noted != present:
            raise ValueError(
                f"fit_posterior was run with another {what} ({noted[:12]}) than the one given ({present[:12]}); "
                "use the same one"
            )
    return written


# --- The choice among several.


def refuse_unpaid(split: Split, kind: str, content_hash: str, *, paid: int, share: str) -> None:
    """The ledger pays for every prior or network that was certified on these examples."""
    tried = {*split.issued.get(kind, []), content_hash}
    if len(tried) > paid:
        raise ValueError(
            f"this is {kind} number {len(tried)} certified on these bound examples, but the ledger pays for "
            f"{share}={paid}; fix the number of candidates in advance and give it as {share}=: each pays its part"
        )


def remember(split: Split, key: str, content_hash: str) -> int:
    """Notes on the split what was certified on it: a prior, a network, or a Q under the hash of its P.

    Returns how many certificates it has seen under this key.
    """
    split.issued.setdefault(key, []).append(content_hash)
    return len(split.issued[key])
