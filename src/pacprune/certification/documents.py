"""What is refused of documents: labels that are misread, and rows that are no documents of their own."""

import math

import torch
from torch import Tensor, nn

from pacprune import bounds
from pacprune.certification.risks import Risk, at_once, half_advice, logits_of, rounding_of
from pacprune.data.batches import device_of
from pacprune.data.splits import IGNORED, Part, Split
from pacprune.training.evaluate import answers, evaluating

_PREFIX, _CHANGES = 32, 8
"""So many tokens at the beginning of a row, with so many changes among them, are looked for inside other rows."""
_ROWS = 4096
"""So many rows are looked at, in the order of their source."""
_RUN = 4
"""A token that ends a row so many times in a row may be padding."""
_AHEAD = 8
"""So many tokens ahead a label may be, to be taken for a prediction of the text itself."""
_CHANCE = 1e-6
"""What chance does less often is taken for a sign."""
_COMPARED = 16
"""So many documents are answered again with other tokens at their end."""


def has_tokens(part: Part) -> bool:
    """Whether the examples are rows of tokens."""
    return part.x.ndim == 2 and not part.x.is_floating_point()


def _is_labelled(part: Part) -> bool:
    """Whether every token of every example has a label."""
    return has_tokens(part) and part.y.shape == part.x.shape


def refuse_misread(split: Split, risk: Risk, name: str, declaration: str | None) -> None:
    """All rules about rows of tokens and their labels. What only looks wrong may be declared."""
    bound = split.bound
    if not risk.tokens and ":" not in name and bound.y.ndim > 1 and bool((bound.y == IGNORED).any()):
        raise ValueError(
            f"{int((bound.y == IGNORED).sum())} labels are {IGNORED}, which does not count, but the risk {name!r} "
            "counts all; take 'token-error', 'token-loss', 'token-drop', 'token-loss-rise' or 'token-disagreement'"
        )
    if risk.tokens and (not has_tokens(bound) or bound.y.is_floating_point()):
        raise ValueError(
            f"x is {bound.x.dtype} of shape {tuple(bound.x.shape)} and y {bound.y.dtype}, but the risk {name!r} is "
            "about documents: give token numbers (n, length), as pp.data.documents makes them"
        )
    if not has_tokens(bound):
        return
    if _is_labelled(bound):
        _refuse_empty(bound)
        _refuse_unshifted(bound)
    if declaration is None:
        if _is_labelled(bound):
            _refuse_holes(bound)
        if _is_labelled(bound) or risk.tokens:
            _refuse_padding(bound, labelled=_is_labelled(bound))
    refuse_windows(split, declaration)


def _refuse_empty(part: Part) -> None:
    """A document without a token that counts has no mean."""
    empty = (part.y == IGNORED).all(1).nonzero().flatten()
    if len(empty):
        raise ValueError(
            f"{len(empty)} of the {len(part)} documents have no label but {IGNORED}, the first of them number "
            f"{int(empty[0])}, so that there is nothing to predict; leave them out"
        )


def _refuse_holes(part: Part) -> None:
    """Which tokens inside a document count decides what the mean is: that has to be said."""
    counted = part.y != IGNORED
    later = counted.flip(1).int().cumsum(1).flip(1) > 0
    holes = int((~counted & later).sum())
    if holes:
        raise ValueError(
            f"{holes} of {int(later.sum())} tokens have the label {IGNORED} and a token after them that counts, so "
            "that the mean is one over chosen tokens; say by declare= which tokens count, such as: only answers count, "
            "not the questions before them"
        )


def _refuse_unshifted(part: Part) -> None:
    """Labels that repeat their own inputs are no predictions."""
    counted = part.y != IGNORED
    copied = float((part.y == part.x)[counted].double().mean())
    if copied >= 0.99 and _next_tokens(part) < 0.99:
        raise ValueError(
            f"{copied:.0%} of the labels are the very tokens that the network is given at their place, not the next "
            "ones; shift them, such as x[:, :-1] and x[:, 1:], or let pp.data.documents do so"
        )
    before = counted[:, 1:] & (part.y[:, 1:] == part.x[:, :-1])
    late = float(before.sum() / counted[:, 1:].sum().clamp_min(1))
    if late >= 0.99 and _next_tokens(part) < 0.99:
        raise ValueError(
            f"{late:.0%} of the labels are the token before their place, which the network is given; shift them the "
            "other way, such as x[:, :-1] and x[:, 1:], or let pp.data.documents do so"
        )
    for ahead in range(2, min(part.x.shape[1] - 1, _AHEAD) + 1):
        share = _next_tokens(part, ahead)
        if share >= 0.99 and _next_tokens(part) < 0.99:
            raise ValueError(
                f"{share:.0%} of the labels are the token {ahead} places after theirs, not the next one; shift them "
                "once, such as x[:, :-1] and x[:, 1:], or let pp.data.documents do so"
            )


def _next_tokens(part: Part, ahead: int = 1) -> float:
    """The share of labels that are the token so far ahead of their place, of those that have one in their row."""
    counted = part.y[:, :-ahead] != IGNORED
    # The last tokens of a document that is padded have their labels outside the row as well.
    counted = counted & (part.y[:, ahead:] != IGNORED)
    return float((counted & (part.y[:, :-ahead] == part.x[:, ahead:])).sum() / counted.sum().clamp_min(1))


def _refuse_padding(part: Part, *, labelled: bool) -> None:
    """Padding that counts: a network that knows it well has a small mean."""
    for tokens, where in ((part.y if labelled else part.x, "end in"), (part.x.flip(1), "begin with")):
        last = tokens[:, -1]
        same = (tokens == last[:, None]).flip(1).int().cumprod(1).sum(1)  # how often the token stands there in a row
        same = torch.where((last != IGNORED) & (same >= _RUN), same, 0)
        if not int(same.sum()):
            continue
        padding = last[same > 0].mode().values
        count, runs = int(same[last == padding].sum()), int(((last == padding) & (same > 0)).sum())
        if count * 100 > tokens.numel():
            raise ValueError(
                f"{runs} of the {len(part)} documents {where} token {int(padding)} at least {_RUN} times, together "
                f"{count} of {tokens.numel()} tokens, as padding does; give padding the label {IGNORED} and put it "
                "last (pp.data.documents does so), or say by declare= that documents are so"
            )


# --- Windows of one document.


def refuse_windows(split: Split, declaration: str | None) -> None:
    """Rows that were cut from one text, one after another or overlapping: they are not independent."""
    if declaration is not None or not has_tokens(split.bound):
        return
    parts = [part for part in (split.prior, split.bound) if len(part)]
    index, x, y = (torch.cat([getattr(part, name) for part in parts]) for name in ("index", "x", "y"))
    order = index.argsort()[:_ROWS]
    index, x, y = index[order], x[order], y[order]
    if y.shape == x.shape:
        _refuse_continued(index, x, y)
    neighbours = index[1:] - index[:-1] == 1
    moved = (x[1:, :-1] == x[:-1, 1:]).all(1) & (x[1:] != x[:-1]).any(1)
    if x.shape[1] > 3 and int((moved & neighbours).sum()) * 2 > max(1, int(neighbours.sum())):
        raise ValueError(
            f"{int((moved & neighbours).sum())} rows are the row before them, one token further on, as examples for "
            "every token of a text are, and these are not independent; give one row for each document (such as by "
            "pp.data.one_token), or say by declare= why each row is a document"
        )
    _refuse_overlapping(x, y)


def _refuse_continued(index: Tensor, x: Tensor, y: Tensor) -> None:
    """Whether rows go on where the one before ends: the last label of a row is the first token of the next."""
    neighbours = index[1:] - index[:-1] == 1
    last, first = y[:-1, -1][neighbours].long(), x[1:, 0][neighbours].long()
    pairs, hits = len(last), int((last == first).sum())
    if hits * 2 <= pairs:
        return
    largest = 1 + int(torch.stack([last.clamp_min(0), first]).max())
    shares = [t.clamp_min(0).bincount(minlength=largest).double() / pairs for t in (last, first)]
    chance = float((shares[0] * shares[1]).sum())
    # Chernoff: so many hits by chance have at most this probability.
    if pairs * bounds.kl_bernoulli(hits / pairs, min(chance, 1.0)) > -math.log(_CHANCE):
        raise ValueError(
            f"{hits} of {pairs} rows go on with the token at which the row before them ends, as windows of one text "
            "do, and windows of one document are not independent; give one row for each document, or say by declare= "
            "why each row is a document"
        )


def _refuse_overlapping(x: Tensor, y: Tensor) -> None:
    """Whether the beginnings of most rows lie inside other rows."""
    size = min(_PREFIX, x.shape[1] // 2)
    if size < 2 * _CHANGES or len(x) < 8:
        return
    hashes = _rolling(x, size)
    changes = torch.cat([torch.zeros(len(x), 1), (x[:, 1:] != x[:, :-1]).cumsum(1)], dim=1)
    telling = changes[:, size - 1] >= _CHANGES
    if y.shape == x.shape:
        telling &= y[:, size - 1] != IGNORED
    inside = torch.isin(hashes[:, 0], hashes[:, 1:].reshape(-1))
    count, total = int((inside & telling).sum()), int(telling.sum())
    if count * 2 > total:
        raise ValueError(
            f"{count} of {total} rows begin with {size} tokens that lie inside other rows, as overlapping windows of "
            "one text do, and these are not independent; give one row for each document, or say by declare= why each "
            "row is a document"
        )


def _rolling(x: Tensor, size: int) -> Tensor:
    """A hash of every passage of so many tokens, by the place where it begins."""
    hashes = torch.zeros(len(x), x.shape[1] - size + 1, dtype=torch.int64)
    for place in range(size):
        hashes = hashes * 6364136223846793005 + x[:, place : place + hashes.shape[1]].long() + 1  # modulo 2^64
    return hashes


# --- The network.


def refuse_foresight(network: nn.Module, part: Part) -> None:
    """Where labels are tokens of the text, an answer must not change with tokens after it: it would know its label."""
    width = part.x.shape[1] if _is_labelled(part) else 0
    if not any(_next_tokens(part, ahead) >= 0.5 for ahead in range(1, min(width, _AHEAD + 1))):
        return
    x = part.x[: at_once(network, part.x, _COMPARED)].to(device_of(network))
    with evaluating(network):
        before = logits_of(answers(network, x))
        if not isinstance(before, Tensor) or before.shape[:2] != x.shape:
            return
        for cut in sorted({1, *(x.shape[1] * quarter // 4 for quarter in (1, 2, 3)), x.shape[1] - 1} - {0}):
            other = torch.cat([x[:, :cut], x[:, cut:].flip(0, 1)], dim=1)
            after = logits_of(answers(network, other))
            moved = ((before - after).abs() > rounding_of(before, after))[:, :cut].flatten(1).any(1)
            if bool(moved.any()):
                raise ValueError(
                    f"the answers to the first {cut} tokens of {int(moved.sum())} of {len(x)} documents change with "
                    "the tokens after them, which are the labels; give a network that looks at earlier tokens alone, "
                    f"such as one with a causal mask{half_advice(before)}"
                )
