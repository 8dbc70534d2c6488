"""Texts of different lengths as pairs (x, y): one document per row, and a label for every token but the padding."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pacprune import philox
from pacprune.data.splits import IGNORED


def documents(texts: Sequence[Any] | Mapping[str, Any], *, length: int) -> tuple[Tensor, Tensor]:
    """Makes a pair (x, y) of documents for a network that predicts the next token: one row for each document.

    Row i of x has the first `length` tokens of document i, row i of y the token after each of them. A shorter document
    ends in zeros, whose label is -100: losses and certificates leave it out. A longer one is cut off: the loss of such
    a document is that of its first tokens. No row is a window from the middle of a document, since windows of one
    document are not independent.

    Args:
        texts: Token numbers of each document, as tensors, arrays or lists. Or a mapping with input_ids (n, length), as
            a tokenizer gives it, and maybe attention_mask (1 for tokens, then 0 for padding) and labels: the same
            tokens, not shifted, with -100 where a token does not count.
        length: Tokens of a row, at most what the network reads at once.

    Returns:
        x and y, int64 of shape (n, length).

    Raises:
        ValueError: If a document has fewer than two tokens, so that there is nothing to predict, or if padding does not
            lie at the end.

    Example:
        >>> x, y = pp.data.documents([[5, 1, 2], [3, 4, 6, 2, 1, 7]], length=4)
        >>> x.tolist(), y.tolist()
        ([[5, 1, 0, 0], [3, 4, 6, 2]], [[1, 2, -100, -100], [4, 6, 2, 1]])
    """
    if length < 1:
        raise ValueError(f"length is {length}, but a row needs at least 1 token: give what the network reads at once")
    inputs, targets = _of_tokenizer(texts) if isinstance(texts, Mapping) else _of_lists(texts)
    x = torch.zeros(len(inputs), length, dtype=torch.int64)
    y = torch.full((len(inputs), length), IGNORED)
    for row, (tokens, labels) in enumerate(zip(inputs, targets, strict=True)):
        cut = max(0, min(length, len(tokens) - 1))
        x[row, :cut], y[row, :cut] = tokens[:cut], labels[1 : cut + 1]
        if cut < 1 or bool((y[row] == IGNORED).all()):
            size = f"has {len(tokens)} token{'s' * (len(tokens) > 1)}, none of which is to be predicted"
            fault = size if len(tokens) else "is empty"
            raise ValueError(f"document {row} {fault}; leave it out, or join it with the document that it belongs to")
    return x, y


def one_token(x: Tensor, y: Tensor, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draws one token of every document, as an example of a classifier: the text before it, and the token itself.

    Every token that counts has the same chance. So a wrong answer has the probability that a wrong token has in the
    mean over its document, and errors of 0 and 1 have the same risk as the risk "token-error". This makes a language
    model a classifier for `pp.certify` and `pp.choose`, whose draws count whole errors.

    Args:
        x: Token numbers, one document per row, as `pp.data.documents` gives them.
        y: The token after each of them, or -100 where none counts.
        seed: Chooses the tokens, by the number of the row and not by what it holds. Fix it before you look: to try
            several is a choice.

    Returns:
        x with -1 from the token that is to be predicted on, for `pp.models.NextToken`; and that token of each row.

    Raises:
        ValueError: If a document has no token that counts.

    Example:
        >>> x, y = pp.data.documents([[5, 1, 2], [3, 4, 6, 2, 1, 7]], length=4)
        >>> inputs, labels = pp.data.one_token(x, y, seed=1)
        >>> inputs.shape, labels.shape
        (torch.Size([2, 4]), torch.Size([2]))
    """
    if x.ndim != 2 or x.shape != y.shape:
        raise ValueError(
            f"x has the shape {tuple(x.shape)} and y {tuple(y.shape)}; give both as (n, length), a label for each token"
        )
    counted = y != IGNORED
    sizes = counted.sum(1)
    if bool((sizes == 0).any()):
        raise ValueError(f"document {int((sizes == 0).nonzero()[0])} has no token that counts; leave it out")
    word = philox.words(2 * len(x), seed=seed, step=0, stream=philox.BATCH)
    chosen = philox.below(sizes, word)  # the number of the token among those that count
    place = ((counted.cumsum(1) - 1 == chosen[:, None]) & counted).int().argmax(1, keepdim=True)
    later = torch.arange(x.shape[1]) > place
    return x.masked_fill(later, -1), y.gather(1, place).squeeze(1)


def _of_lists(texts: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tokens of every document, which are its labels as well."""
    rows = [torch.as_tensor(text) for text in texts]
    for place, tokens in enumerate(rows):
        if tokens.ndim != 1 or (len(tokens) and (tokens.is_floating_point() or int(tokens.min()) < 0)):
            raise ValueError(
                f"document {place} is {tokens.dtype} of shape {tuple(tokens.shape)}; give one list of token numbers "
                "from 0 up for each document"
            )
    if not rows:
        raise ValueError("there are 0 documents; give at least one list of token numbers")
    return rows, rows


def _of_tokenizer(batch: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tokens of every row before its padding, and their labels."""
    if "input_ids" not in batch:
        raise ValueError(f"the mapping has {', '.join(map(str, batch)) or 'nothing'}, but no input_ids; give these")
    tokens = torch.as_tensor(batch["input_ids"]).long()
    labels, mask = (
        torch.as_tensor(batch[name]).long() if name in batch else other
        for name, other in (("labels", tokens), ("attention_mask", torch.ones_like(tokens)))
    )
    if tokens.ndim != 2 or not tokens.shape == labels.shape == mask.shape:
        raise ValueError(
            f"input_ids have the shape {tuple(tokens.shape)}, labels {tuple(labels.shape)} and attention_mask "
            f"{tuple(mask.shape)}; give all of them as (n, length)"
        )
    ends = (mask != 0).sum(1)
    if bool(((mask != 0) != (torch.arange(mask.shape[1]) < ends[:, None])).any()):
        raise ValueError(
            "attention_mask has a 0 before a 1, but the network is not given the mask, so that padding must come last; "
            'tokenize with padding_side="right"'
        )
    other = (labels != tokens) & (labels != IGNORED) & (mask != 0)
    if bool(other.any()):
        raise ValueError(
            f"{int(other.sum())} labels are neither the token at their place nor {IGNORED}; give labels that are not "
            "shifted, as transformers takes them, or leave them out"
        )
    cut = ends.tolist()
    return [row[:end] for row, end in zip(tokens, cut, strict=True)], [
        row[:end] for row, end in zip(labels, cut, strict=True)
    ]
