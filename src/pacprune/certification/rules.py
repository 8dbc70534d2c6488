"""What is refused, and why: every rule that a certificate rests on is one function that raises when it is broken."""

import math
from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor, nn

from pacprune import philox
from pacprune.certification import documents, drawn_networks
from pacprune.certification.bounds_table import FAMILIES, RISK_BOUNDS
from pacprune.certification.record import Group, Shares
from pacprune.certification.risks import at_once, half_advice, logits_of, rounding_of
from pacprune.certification.verify import LEAVES
from pacprune.data import trace
from pacprune.data.splits import Split, check_split, refuse_overwritten
from pacprune.data.trace import Trace
from pacprune.masking import attachment, weights
from pacprune.masking.spikeslab import SpikeSlab
from pacprune.training.checks import errs_as_trained
from pacprune.training.evaluate import BATCH, answers, evaluating
from pacprune.training.posterior import refuse_if_touched, touched
from pacprune.types import check_module

_STEADY = 64
"""So many examples are answered in several ways, to see whether an answer follows from its input alone."""
_PIECES = 16
"""Into so many pieces batches are cut to answer them again."""


def bound_examples(n: int) -> str:
    """So many of them, in words."""
    return f"{n:,} bound example{'s' * (n != 1)}"


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


def check_delta(delta: float) -> None:
    """Refuses a probability that no sentence can name."""
    if not 1e-12 <= delta < 1:
        raise ValueError(f"delta is {delta}; it must lie in [1e-12, 1): give a fraction, such as 0.05")


def checked_shares(shares: Mapping[str, tuple[int, float]] | None, group: str | None) -> Shares | None:
    """The declared division of delta as a certificate states it: name -> (certificates, their share together)."""
    if shares is None and group is None:
        return None
    if shares is None or group is None or group not in shares:
        raise ValueError(
            f"group is {group!r} and shares has {list(shares or ())}; give both, and a group that is among the shares"
        )
    groups: dict[str, Group] = {}
    for name, (certificates, share) in shares.items():
        fits = LEAVES["name"](name) and LEAVES["count"](certificates) and certificates > 0
        if not fits or not 1e-12 * certificates <= share <= 1:
            raise ValueError(
                f"the share {name!r:.80} is {(certificates, share)}; give a plain name, a number of certificates, and "
                "what they get of delta together, at most 1 and at least 1e-12 for each"
            )
        groups[name] = {"certificates": certificates, "share": float(share)}
    total = math.fsum(entry["share"] for entry in groups.values())
    if total > 1 + 1e-12:
        raise ValueError(
            f"the declared shares of delta add up to {total:g}, but must be 1 or less; declare smaller ones"
        )
    return {"group": group, "groups": groups}


def checked_declaration(declare: str | None) -> str | None:
    """The issuer's own words as a certificate quotes them."""
    if declare is None:
        return None
    words = " ".join(declare.split()).removesuffix(".") if isinstance(declare, str) else ""
    if not 10 <= len(words) <= 500 or not words.isascii() or not words.isprintable() or '"' in words:
        raise ValueError(
            f"declare is {declare!r:.80}; give one sentence of 10 to 500 plain characters (ASCII, no double quotes) "
            "that can be quoted, such as: the network was trained on ImageNet alone"
        )
    return words


# --- The data.


def refuse_split(split: Split) -> None:
    """All rules about the data of a classifier alone."""
    check_split(split)
    refuse_cut(split)


def refuse_cut(split: Split) -> None:
    """All rules about how the data were cut and standardised."""
    refuse_overwritten(split.prior, split.bound, split.unlabelled)
    refuse_overlap(split)
    refuse_order(split)
    refuse_standardisation(split)


def refuse_order(split: Split) -> None:
    """The parts are cut as the seed says, unless the issuer declared the index lists."""
    if split.declared:
        return
    order = torch.cat([part.index for part in (split.prior, split.bound, split.unlabelled)])
    cut = torch.equal(order.argsort().argsort(), philox.permutation(len(order), seed=split.seed))
    # A test part may be cut off the same examples, at their end.
    joined = torch.equal(order, philox.permutation(len(order) + len(split.test), seed=split.seed)[: len(order)])
    if not cut and not joined:
        raise ValueError(
            f"the parts are not those that the seed {split.seed} cuts; make the split by pp.data.split, and index "
            "lists of your own by indices= and split_declared_random=True"
        )


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
    if not len(split.prior):
        raise ValueError(
            "the inputs are standardised, but split.prior is empty, so that the constants may have seen the bound set; "
            "leave the inputs as they are"
        )
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


def refuse_repeats(split: Split, declaration: str | None) -> None:
    """Copies made by oversampling, and windows of one text, are not independent: they need the issuer's word."""
    if split.repeats * 100 > len(split.bound) and declaration is None:
        raise ValueError(
            f"{split.repeats} of the {len(split.bound)} bound examples are copies of others, and copies are not "
            "independent; remove them, or say by declare= why new data repeat as often"
        )
    documents.refuse_windows(split, declaration)


# --- What training used.


def is_data_free(split: Split) -> bool:
    """Whether a prior of this split must have seen no data: its prior part is empty, as prior_fraction=0 leaves it."""
    return not len(split.prior) and not split.declared


def refuse_untraced_prior(prior: SpikeSlab, split: Split, declaration: str | None) -> None:
    """`refuse_untraced` of a prior, which has the first weights of a network where the split has no prior examples."""
    seen = prior.origin.without(trace.UNTRAINED) if is_data_free(split) else prior.origin
    refuse_untraced(seen, split, "the prior", declaration)


def refuse_untraced(seen: Trace, split: Split, who: str, declaration: str | None) -> None:
    """What shaped a network is known to be split.prior, or the issuer says what it was."""
    refuse_if_touched(seen, split, who)
    if declaration is not None:
        return
    remedy = (
        "train it by pacprune on split.prior (its .augmented(transform) and .loader(...) are known as such), or say "
        'what shaped it: declare="it was trained on ..."'
    )
    if trace.UNTRAINED in seen.labelled:
        raise ValueError(
            f"pacprune has never trained {who}, or not every layer of it, so that nobody knows what it has seen; "
            f"{remedy}"
        )
    marks = torch.tensor([trace.FOREIGN, trace.UNKNOWN_MASK])
    # A pair (x, y) is all bound examples: training is traced by having used none of them.
    is_pair = not len(split.prior) and split.declared
    known = seen.labelled[~torch.isin(seen.labelled, marks)] if is_pair else split.prior.known.labelled
    unknown = seen.labelled[~torch.isin(seen.labelled, known)]
    if trace.FOREIGN in unknown:
        raise ValueError(f"weights of {who} were made or changed by something other than pacprune; {remedy}")
    if trace.UNKNOWN_MASK in unknown:
        raise ValueError(f"a mask or a tensor of {who} was not computed by pacprune; {remedy}")
    if len(unknown):
        raise ValueError(
            f"{who} was trained on {len(unknown)} examples or labels that are not those of split.prior, so that nobody "
            f"knows whether they tell of the bound set; {remedy}"
        )


def refuse_hidden(network: nn.Module, who: str, declaration: str | None) -> None:
    """Refuses tensors and modules of which no training notes what they have seen, and which no hash has."""
    places = [] if declaration is not None else weights.hidden(network)
    if places:
        raise ValueError(
            f"{who} keeps {weights.some(places, 3)} as a plain attribute, so that nobody knows what it has seen, and "
            "no hash tells it from another; make it a parameter, a buffer (register_buffer) or a module of the "
            'network, or say what it is: declare="the attribute holds ..."'
        )


def refuse_chosen(network: nn.Module, split: Split, who: str, declaration: str | None) -> None:
    """What was trained after something else was trained on bound examples may have been chosen by its loss there."""
    told = trace.looked(before=weights.last_change(network), trained=True)
    count = 0 if declaration is not None else touched(told, split.bound, apart_from=split.prior)
    if count:
        raise ValueError(
            f"before {who} was trained or pruned, something else was trained on {count} of the {len(split.bound)} "
            f"bound examples, by whose losses {who} may have been chosen; train it first, or in another process, or "
            'say that nothing was chosen so: declare="no setting was chosen by ..."'
        )


def refuse_trained_start(plain: nn.Module, prior: SpikeSlab, split: Split, declaration: str | None) -> None:
    """Refuses a prior without data whose means answer so well that something has trained them."""
    if declaration is not None or not is_data_free(split) or trace.UNTRAINED not in prior.origin.labelled:
        return
    wrong = drawn_networks.errors(plain, dict(prior.mean), split.bound).cpu()
    if errs_as_trained(wrong, split.bound.y):
        raise ValueError(
            f"the means of the prior err on {float(wrong.double().mean()):.4f} of the bound examples, less than any "
            "first weights do, so that something has trained them; build the network anew, or say what shaped it: "
            'declare="it was trained on ..."'
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


def refuse_unsteady(network: nn.Module, x: Tensor, *, values: bool = False) -> None:
    """An answer follows from its input alone, whatever else is in the batch, and is the same each time.

    Some inputs are answered twice as a batch, and then one by one. Then all are answered in the batches that are
    counted, and once more in smaller ones and in another order. Answers may differ where two outputs lie closer
    together than rounding can tell. With `values`, the outputs themselves are the answer, and not their largest one.
    Parameters and buffers stay as they are.
    """
    state = weights.fingerprint(network)
    with evaluating(network):
        few = x[: at_once(network, x, _STEADY)]
        outputs = logits_of(answers(network, few))
        if not isinstance(outputs, Tensor):
            return  # `mistakes` says that an error needs logits
        values = values or outputs.ndim == 1 or outputs.shape[-1] == 1  # one output, whose sign is the answer
        why = "differ when they are asked for again: it draws something at random, such as dropout"
        _refuse_others(outputs, logits_of(answers(network, few)), why, values=values)
        why = "depend on what else is in the batch: it uses statistics of the batch"
        _refuse_others(outputs, _in_pieces(network, few, 1), why, values=values)
        for batch in x.split(at_once(network, x, BATCH)):
            order = philox.permutation(len(batch), seed=0)
            others = _in_pieces(network, batch[order], 1 + len(batch) // _PIECES)
            _refuse_others(logits_of(answers(network, batch))[order], others, why, values=values)
    refuse_moved(network, state)


def refuse_moved(network: nn.Module, state: int | None) -> None:
    """Refuses a network whose `weights.fingerprint` was another one before it has answered."""
    if weights.fingerprint(network) != state:
        raise ValueError(
            "parameters or buffers of the network change when it answers, in eval mode too, so that its answers follow "
            "from those before; let it leave its state alone"
        )


def _in_pieces(network: nn.Module, x: Tensor, size: int) -> Tensor:
    """The outputs for x, so many inputs at a time."""
    return torch.cat([logits_of(answers(network, piece)) for piece in x.split(size)])


def _refuse_others(outputs: Tensor, others: Tensor, why: str, *, values: bool) -> None:
    """Refuses outputs of which the others are not the same up to rounding."""
    count = (_other_values if values else _other_answers)(outputs, others)
    if count:
        total = len(outputs) if values else outputs[..., 0].numel()
        raise ValueError(
            f"{count} of {total} answers of the network {why}, in eval mode too; let every answer follow from its own "
            f"input alone{half_advice(outputs)}"
        )


def _other_answers(batch: Tensor, others: Tensor) -> int:
    """How many answers differ by more than rounding."""
    if batch.shape != others.shape:
        return len(batch)
    rounding = rounding_of(batch, others)
    allowed = rounding[batch.argmax(-1)] + rounding[others.argmax(-1)]
    margins = torch.stack([_margins(batch, others), _margins(others, batch)])
    # A tie in one of them alone is none of rounding: logits less their mean over the batch are all 0 one by one.
    return int((margins > allowed).any(0).sum())


def _margins(outputs: Tensor, others: Tensor) -> Tensor:
    """By how much the answer of the others is not that of the outputs."""
    return (outputs.amax(-1, keepdim=True) - outputs.gather(-1, others.argmax(-1, keepdim=True))).squeeze(-1)


def _other_values(batch: Tensor, others: Tensor) -> int:
    """How many examples have an output that differs by more than rounding."""
    if batch.shape != others.shape:
        return len(batch)
    rounding = rounding_of(batch, others)
    differs = (batch != others) & ~((batch - others).abs() <= rounding)  # infinite numbers may be equal
    return int(differs.reshape(len(batch), -1).any(1).sum())


def refuse_random(model: nn.Module) -> None:
    """A held-out certificate is about one network, not about a distribution."""
    check_module(model)
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


def refuse_without_receipt(model: nn.Module, prior: SpikeSlab, split: Split) -> None:
    """`fit_posterior` leaves a receipt: it shows that this P was written before this bound set was read."""
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
