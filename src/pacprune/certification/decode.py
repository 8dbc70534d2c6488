"""A certificate folder as a Certificate, by the one reader of verify.py; its tensors as what they stand for."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from pacprune.certification import verify
from pacprune.certification.certificate import Certificate
from pacprune.certification.drawn_networks import Counts
from pacprune.masking import weights
from pacprune.masking.spikeslab import SpikeSlab


def load(folder: str | Path) -> Certificate:
    """A saved certificate, of which the form and all hashes of files are right; `pp.verify` checks the rest."""
    try:
        return certificate(verify.read(folder))
    except verify.Refused as refusal:
        raise ValueError(f"{folder} is no certificate: {refusal}; ask the issuer for it again") from refusal


def certificate(contents: verify.Folder) -> Certificate:
    """What was read, with torch's tensors."""
    tensors = {
        f"{file}.safetensors": {name: _tensor(array) for name, array in entries.items()}
        for file, entries in contents.tensors.items()
    }
    return Certificate(contents.record, tensors)  # type: ignore[arg-type]


def _tensor(array: np.ndarray) -> Tensor:
    """The same numbers; bfloat16, which numpy lacks, was read as uint16."""
    copied = np.array(array)
    return (
        torch.from_numpy(copied.view(np.int16)).view(torch.bfloat16)
        if copied.dtype == np.uint16
        else torch.from_numpy(copied)
    )


def distribution(cert: Certificate, whose: str, plain: nn.Module) -> SpikeSlab:
    """P ("prior") or Q ("posterior"), its weights numbered in the order of the model and on its device."""
    stored = cert.tensors["distributions.safetensors"]
    names = [name for name in weights.all_weights(plain) if f"{whose}/keep_prob/{name}" in stored]
    device = next(plain.parameters()).device
    keep_prob, mean, std = (
        {name: stored[f"{whose}/{part}/{name}"].to(device) for name in names} for part in ("keep_prob", "mean", "std")
    )
    rest = {key.removeprefix("rest/"): t for key, t in stored.items() if key.startswith("rest/")}
    return SpikeSlab(keep_prob, mean, std, rest=rest, total=cert.record["total"])


def counts(cert: Certificate, whose: str) -> Counts:
    """The counts of every draw of P ("prior") or Q ("posterior")."""
    stored = cert.tensors["draws.safetensors"]
    wrong, plus, minus = (stored[f"{whose}/{what}"] for what in ("wrong", "plus", "minus"))
    return Counts(cert.pac_bayes["monte_carlo"]["batch"], wrong, plus, minus)
