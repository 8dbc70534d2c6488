"""The one reader of a certificate's files: the folder as a Certificate, and its tensors as what they stand for."""

import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from pacprune.certification.certificate import PACKED, RECORD, Certificate
from pacprune.certification.drawn_networks import Counts
from pacprune.certification.record import FORMAT, VERSION, Record
from pacprune.masking import weights
from pacprune.masking.spikeslab import SpikeSlab


def load(folder: str | Path) -> Certificate:
    """A saved certificate, unchecked: `pp.verify` checks it."""
    folder = Path(folder)
    record = _read_record(folder)
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in record.get("files", {}):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder / name} is missing, though {RECORD} names it; ask the issuer for the whole folder"
            )
        try:
            if name == PACKED:
                tensors |= unpack(folder / name)
            else:
                tensors[name] = load_tensors((folder / name).read_bytes())
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{folder / name} cannot be read ({error}); ask the issuer for it again") from error
    return Certificate(record, tensors)


def _read_record(folder: Path) -> Record:
    path = folder / RECORD
    if not path.is_file():
        raise ValueError(f"{folder} holds no {RECORD}; give the folder that `save` wrote")
    try:
        record = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not valid JSON ({error}); it was cut short or changed, ask the issuer for it again"
        ) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("version") != VERSION:
        content = (
            f"{record.get('format')!r} version {record.get('version')!r}"
            if isinstance(record, dict)
            else type(record).__name__
        )
        raise ValueError(f"{path} is {content}, but this is for {FORMAT!r} version {VERSION}; use a matching pacprune")
    return record  # pyright: ignore[reportReturnType] - `verify` checks its fields


def unpack(path: Path) -> dict[str, dict[str, Tensor]]:
    """The files that `certificate.pack` made one of."""
    with safe_open(path, framework="pt") as file:
        blobs, index = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["index"])  # noqa: SIM118

    def tensor(dtype: str, shape: list[int], values: str, *bits: str) -> Tensor:
        flat = blobs[values].to(getattr(torch, dtype))
        if bits:
            differs = torch.from_numpy(np.unpackbits(blobs[bits[0]].numpy())[: math.prod(shape)] == 1)
            flat = flat[:1].repeat(len(differs)).masked_scatter(differs, flat[1:].expand(int(differs.sum())))
        return flat.reshape(shape)

    return {file: {name: tensor(*entry) for name, entry in entries.items()} for file, entries in index.items()}


def distribution(cert: Certificate, whose: str, plain: nn.Module) -> SpikeSlab:
    """P ("prior") or Q ("posterior"), its weights numbered in the order of the model and on its device."""
    stored = cert.tensors["distributions.safetensors"]
    names = [name for name in weights.prunable(plain) if f"{whose}/keep_prob/{name}" in stored]
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
