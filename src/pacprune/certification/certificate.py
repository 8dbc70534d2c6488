"""Certificate: a bound on the error on new data and the numbers it follows from; how it reads, is saved and loaded."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from pacprune.bounds import Ledger
from pacprune.files import write_atomically

FORMAT, VERSION = "pacprune certificate", 1
RECORD, PACKED = "certificate.json", "packed.safetensors"

LABELS = {
    "seeger": "Gibbs, Seeger-Maurer",
    "paper": "Gibbs, the paper's theorem (follows from Seeger-Maurer)",
    "catoni": "Gibbs, Catoni",
    "excess": "Gibbs, excess loss over the thresholded prior",
    "q_equals_p": "Gibbs of the prior, Q = P",
    "vote": "majority vote, twice the Gibbs bound",
    "single_draw": "one drawn sparse network, disintegrated",
    "thresholded": "thresholded network, by agreement with Q",
    "held_out": "thresholded prior, held-out Clopper-Pearson",
}
"""What each entry of `bounds` is about, in the order of printing."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is proved about a pruned network. `record` is certificate.json; `tensors` are the files beside it.

    `record["claim"]` names the bound that was declared beforehand. The other bounds are each valid by themselves at the
    same delta, for somebody who had declared that one; they do not all hold at once.
    """

    record: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]]

    @property
    def bound(self) -> float:
        """The certificate: the error on new data is at most this."""
        return self.record["claim"]["bound"]

    @property
    def bounds(self) -> dict[str, float]:
        """All bounds by name: the claim, its alternatives and the baselines."""
        return {name: entry["bound"] for name, entry in self.record["bounds"].items()}

    @property
    def ledger(self) -> Ledger:
        """How the delta of the claim is spent."""
        return Ledger.from_dict(self.record["bounds"][self.record["claim"]["family"]]["ledger"])

    @property
    def n(self) -> int:
        """The number of bound examples."""
        return self.record["n"]

    @property
    def kl(self) -> float:
        """KL(Q||P) in nats, rounded up; 0 for a deterministic network."""
        return self.record.get("kl", 0.0)

    @property
    def risk(self) -> float:
        """The empirical risk on the bound set: estimated for a random network, counted for a deterministic one."""
        if "monte_carlo" in self.record:
            return self.record["monte_carlo"]["posterior"]["risk"]
        return self.record["reference"]["errors"] / self.n

    @property
    def risk_upper(self) -> float:
        """The upper bound of the empirical risk after the Monte-Carlo step."""
        return self.record["monte_carlo"]["posterior"]["risk_upper"] if "monte_carlo" in self.record else self.risk

    @property
    def draws(self) -> int:
        """How many networks were sampled."""
        return self.record["monte_carlo"]["posterior"]["draws"] if "monte_carlo" in self.record else 0

    @property
    def sparsity(self) -> float:
        """Expected sparsity of Q, or counted sparsity of a deterministic network."""
        return self.record["sparsity"]

    @property
    def statement(self) -> str:
        """What is proved, in one sentence."""
        return self.record["statement"]

    @property
    def winner(self) -> str:
        """Which certificate a user should take, in words."""
        if self.record["kind"] == "held-out":
            return "a held-out certificate: nothing to compare"
        held_out, prior = self.bounds["held_out"], self.bounds["q_equals_p"]
        if held_out < min(self.bound, prior):
            return "use the held-out one: it is tighter here"
        if self.bound < prior:
            return "the posterior earned its KL: its certificate is lower than that of Q = P"
        return "Q = P is as good: the posterior did not earn its KL here"

    def __str__(self) -> str:
        family = self.record["claim"]["family"]
        if family == "held_out":
            tried = self.ledger.certified
            choice = f", divided by {tried} for a choice among {tried} networks" if tried > 1 else ""
            errors = self.record["reference"]["errors"]
            return f"{self.statement}\n\n   {errors} errors; delta {self.ledger.delta:g}{choice}"
        rows = [(name, self.bounds[name]) for name in LABELS if name in self.bounds]
        lines = [self.statement, ""]
        lines += [f"{'->' if name == family else '  '} {LABELS[name]:<58} {rounded_up(value)}" for name, value in rows]
        lines += ["", f"   {self.winner}"]
        if "monte_carlo" in self.record:
            lines.append(
                f"   empirical risk {self.risk:.4f}, at most {rounded_up(self.risk_upper)} after {self.draws:,} draws "
                f"(Chernoff: {rounded_up(self.record['monte_carlo']['posterior']['chernoff'])}); "
                f"KL {self.kl:.3f} nats; n = {self.n:,}"
            )
        lines.append(f"   {self.ledger}")
        if self.record["split"]["duplicates"]:
            lines.append(
                f"   {self.record['split']['duplicates']} of the {self.n:,} bound examples also occur, to the byte, "
                "in the prior part: they are not new to P"
            )
        if self.record.get("certify_calls", 1) > 1:
            lines.append(
                f"   certified {self.record['certify_calls']} times against this prior: if you choose among these, "
                "each must pay for the choice (certified=)"
            )
        return "\n".join(lines)

    def save(self, folder: str | Path, *, packed: bool = False) -> Path:
        """Writes certificate.json and the tensor files; the record, which names their hashes, is written last.

        `packed` writes one small file in place of several that can be loaded as they are: see `pack`.
        """
        folder = Path(folder)
        if packed:
            files = {PACKED: pack(self.tensors)}
        else:
            files = {
                name: save_tensors({k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()})
                for name, tensors in self.tensors.items()
            }
        for name, content in files.items():
            write_atomically(folder / name, content)
        record = {
            **self.record,
            "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        }
        record["digest"] = digest(record)
        write_atomically(folder / RECORD, (json.dumps(record, indent=2, allow_nan=False) + "\n").encode())
        return folder


def digest(record: Mapping[str, Any]) -> str:
    """SHA-256 of the record's canonical JSON (sorted keys, no spaces) without its own `digest`."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def pack(files: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """Several tensor files as one, without loss: equal content is stored once, and mostly constant tensors as masks.

    The header's "index" is {file: {name: [dtype, shape, values]}}; where most entries equal values[0] it is [dtype,
    shape, values, bits]: the entries whose bit is set are values[1:], one each or one for all. Values may be stored in
    a narrower integer type than their own.
    """
    blobs: dict[str, Tensor] = {}
    known: dict[bytes, str] = {}

    def blob(flat: Tensor) -> str:
        content = f"{flat.dtype};".encode() + flat.view(torch.uint8).numpy().tobytes()
        key = known.setdefault(hashlib.sha256(content).digest(), str(len(known)))
        blobs.setdefault(key, flat)
        return key

    index: dict[str, dict[str, list[Any]]] = {}
    for file, tensors in files.items():
        entries = index.setdefault(file, {})
        for name, tensor in tensors.items():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            entry = [str(flat.dtype).removeprefix("torch."), list(tensor.shape)]
            if not (flat.is_floating_point() or flat.dtype == torch.bool) and (flat >= 0).all() and (flat < 256).all():
                flat = flat.to(torch.uint8)
            # By their bytes, so that 0.0 and -0.0 stay what they are.
            words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
            fill = words.mode().values if len(words) else words
            keep = words != fill
            others = flat[keep]
            if len(others) and bool((words[keep] == words[keep][0]).all()):
                others = others[:1]
            if len(others) * flat.element_size() + len(flat) / 8 < 0.9 * len(flat) * flat.element_size():
                bits = torch.from_numpy(np.packbits(keep.numpy()))
                entry += [blob(torch.cat([flat[~keep][:1], others])), blob(bits)]
            else:
                entry.append(blob(flat))
            entries[name] = entry
    return save_tensors(blobs, metadata={"index": json.dumps(index)})


def unpack(path: Path) -> dict[str, dict[str, Tensor]]:
    """The files that `pack` made one of."""
    with safe_open(path, framework="pt") as file:
        blobs, index = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["index"])  # noqa: SIM118

    def tensor(dtype: str, shape: list[int], values: str, *bits: str) -> Tensor:
        flat = blobs[values].to(getattr(torch, dtype))
        if bits:
            keep = torch.from_numpy(np.unpackbits(blobs[bits[0]].numpy())[: math.prod(shape)] == 1)
            flat = flat[:1].repeat(len(keep)).masked_scatter(keep, flat[1:].expand(int(keep.sum())))
        return flat.reshape(shape)

    return {file: {name: tensor(*entry) for name, entry in entries.items()} for file, entries in index.items()}


def load(folder: str | Path) -> Certificate:
    """A saved certificate, unchecked: `pp.verify` checks it."""
    folder = Path(folder)
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
        found = (
            f"{record.get('format')!r} version {record.get('version')!r}"
            if isinstance(record, dict)
            else type(record).__name__
        )
        raise ValueError(f"{path} is {found}, but this is for {FORMAT!r} version {VERSION}; use a matching pacprune")
    tensors = {}
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


def percent(delta: float) -> str:
    """100 (1 - delta) in all its digits: 95 for .05, and 99.999999 for 1e-8 rather than 100."""
    return f"{(100 - 100 * Decimal(f'{delta:.12g}')).normalize():f}"


def rounded_down(value: float) -> str:
    """Four digits, rounded down (but for 1e-6, the rounding of the gates): a sparsity must not be overstated."""
    return f"{math.floor(value * 1e4 + 1e-2) / 1e4:.4f}"


def rounded_up(value: float) -> str:
    """Four digits, rounded up: a certificate must not be rounded in its own favour."""
    return f"{math.ceil(value * 1e4 - 1e-9) / 1e4:.4f}"
