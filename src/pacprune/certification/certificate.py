"""Certificate: a bound on the error on new data and the numbers it follows from; how it reads and is saved."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from pacprune.bounds import Ledger
from pacprune.bounds.numeric import rounded_up
from pacprune.certification import verify
from pacprune.certification.bounds_table import BOUNDS
from pacprune.certification.record import PacBayesRecord, Record, RiskRecord, RiskTest
from pacprune.certification.tries import Tries
from pacprune.data.splits import Split
from pacprune.files import mask_gaps, write_atomically

RECORD, PACKED = "certificate.json", "packed.safetensors"


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is proved about a pruned network: a bound on its error rate on new data, and what the bound follows from.

    `record["claim"]` names the bound that was declared beforehand. The other bounds are each valid by themselves at the
    same delta, for somebody who had declared that one; they do not all hold at once.

    Args:
        record: What certificate.json holds; every field is described in certification/record.py.
        tensors: The files beside it: tensors by name, by file name.
        tries: How many certificates there were on the same examples; it is printed, and not saved. None for a
            certificate that was read from a folder.

    Example:
        >>> history = pp.fit(model, split.prior, pp.Config(epochs=1, lr=0.1))
        >>> certificate = pp.certify_held_out(model, split)
        >>> folder = certificate.save("network")
        >>> pp.verify(folder).valid
        True
    """

    record: Record
    tensors: Mapping[str, Mapping[str, Tensor]]
    tries: Tries | None = None

    def __repr__(self) -> str:
        name = f"{self.record['model']}, " if self.record["model"] else ""
        risk = self.record["risk"]["name"] if self.record["kind"] == "risk" else "error"
        return f"Certificate({name}{self.record['kind']}: {risk} at most {rounded_up(self.bound)}, n {self.n:,})"

    @property
    def bound(self) -> float:
        """The certificate: the error on new data, or another risk, is at most this."""
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
    def pac_bayes(self) -> PacBayesRecord:
        """The record of a random network; a ValueError for a deterministic one."""
        if self.record["kind"] != "pac-bayes":
            raise ValueError(
                f"this is a {self.record['kind']} certificate, which has neither P nor Q; make one by pp.certify"
            )
        return self.record

    @property
    def n(self) -> int:
        """The number of bound examples."""
        return self.record["n"]

    @property
    def kl(self) -> float:
        """KL(Q||P) in nats, rounded up; 0 for a deterministic network."""
        return self.record["kl"] if self.record["kind"] == "pac-bayes" else 0.0

    @property
    def risk(self) -> float:
        """The empirical risk on the bound set: estimated for a random network, counted for a deterministic one."""
        if self.record["kind"] == "pac-bayes":
            return self.record["monte_carlo"]["posterior"]["risk"]
        if self.record["kind"] == "risk":
            return self._claimed(self.record)["mean"]
        return self.record["reference"]["errors"] / self.n

    @property
    def tests(self) -> list[RiskTest]:
        """What was found of each network, or group, of a certificate of a risk: sparsity, counts, p_value, passed."""
        return self.record["tests"] if self.record["kind"] == "risk" else []

    @property
    def passed(self) -> int:
        """How many candidates of a sequence passed; 0 where none was tested."""
        return sum(bool(test["passed"]) for test in self.tests)

    @property
    def limit(self) -> float | None:
        """What the risk of the candidates that passed does not exceed; None where nothing was tested."""
        return self.record["limit"] if self.record["kind"] == "risk" else None

    def _claimed(self, record: RiskRecord) -> RiskTest:
        """The test that the claim is about: the last that passed, or the worst group of the network."""
        if record["rule"] == "sequence":
            return record["tests"][max(self.passed - 1, 0)]
        tests = [test for test in record["tests"] if test["network"] == record["hashes"]["model"]]
        return max(tests, key=lambda test: -1.0 if test["bound"] is None else test["bound"])

    @property
    def risk_upper(self) -> float:
        """The upper bound of the empirical risk after the Monte-Carlo step."""
        if self.record["kind"] == "pac-bayes":
            return self.record["monte_carlo"]["posterior"]["risk_upper"]
        return self.risk

    @property
    def draws(self) -> int:
        """How many networks were sampled."""
        return self.record["monte_carlo"]["posterior"]["draws"] if self.record["kind"] == "pac-bayes" else 0

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
        if self.record["kind"] != "pac-bayes":
            return "a held-out certificate: nothing to compare"
        held_out, prior = self.bounds["held_out"], self.bounds["q_equals_p"]
        if held_out < min(self.bound, prior):
            return "use the held-out one: it is tighter here"
        if self.bound < prior:
            return "the posterior earned its KL: its certificate is lower than that of Q = P"
        return "Q = P is as good: the posterior did not earn its KL here"

    def __str__(self) -> str:
        return self._pac_bayes_text(self.record) if self.record["kind"] == "pac-bayes" else self._held_out_text()

    def _held_out_text(self) -> str:
        ledger = self.ledger
        choice = f", divided by {ledger.certified} for a choice among {ledger.certified} networks"
        spent = f"delta {ledger.delta:g}{choice if ledger.certified > 1 else ''}"
        if self.record["kind"] == "risk":
            lines = [*map(test_line, self.record["tests"]), spent, *self._remarks()]
        else:
            lines = [f"{round(self.risk * self.n)} errors; {spent}", *self._remarks()]
        return "\n".join([self.statement, "", *(f"   {line}" for line in lines)])

    def _remarks(self) -> list[str]:
        """What a reader should know of the examples and of other certificates on them."""
        split, lines = self.record["split"], []
        if split["duplicates"]:
            lines.append(
                f"{split['duplicates']} of the {self.n:,} bound examples also occur in the prior part: they are not new"
            )
        if split["repeats"]:
            lines.append(f"{split['repeats']} of the {self.n:,} bound examples are copies of others")
        return lines if self.tries is None else [*lines, str(self.tries)]

    def _pac_bayes_text(self, record: PacBayesRecord) -> str:
        lines = [self.statement, ""]
        for name, bound in BOUNDS.items():
            if name in self.bounds:
                arrow = "->" if name == record["claim"]["family"] else "  "
                lines.append(f"{arrow} {bound.label:<58} {rounded_up(self.bounds[name])}")
        lines += [
            "",
            f"   {self.winner}",
            f"   empirical risk {self.risk:.4f}, at most {rounded_up(self.risk_upper)} after {self.draws:,} draws "
            f"(Chernoff: {rounded_up(record['monte_carlo']['posterior']['chernoff'])}); "
            f"KL {self.kl:.3f} nats; n = {self.n:,}",
            f"   {self.ledger}",
            *(f"   {line}" for line in self._remarks()),
        ]
        return "\n".join(lines)

    def save(self, folder: str | Path, *, packed: bool = False) -> Path:
        """Writes certificate.json and the tensor files; the record, which names their hashes, is written last.

        Args:
            folder: Where to write; it is made if it is missing.
            packed: Whether to write one small file in place of several that can be loaded as they are.

        Returns:
            The folder, for `pp.verify`.

        Raises:
            ValueError: If no candidate of a sequence has passed, so that there is nothing to certify.
        """
        if self.limit is not None and not self.passed:
            raise ValueError(f"there is nothing to certify: {self.statement}")
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


def test_line(test: RiskTest) -> str:
    """One test, for a reader."""
    subject = f"sparsity {rounded_down(test['sparsity'])}" if test["group"] is None else f"{test['group']}"
    line = f"{subject}: {test['mean']:.4f} on {test['n']:,} examples"
    if test["p_value"] is not None:
        line += f", p-value {test['p_value']:.3g}, {'passed' if test['passed'] else 'not passed'}"
    return line if test["bound"] is None else f"{line}, at most {rounded_up(test['bound'])}"


def digest(record: Mapping[str, object]) -> str:
    """SHA-256 of the record's canonical JSON (sorted keys, no spaces) without its own `digest`."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    ).hexdigest()


def pack(files: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """Several tensor files as one, without loss: equal content is stored once, and mostly constant tensors as masks.

    The header's "index" is {file: {name: [dtype, shape, values]}}; where most entries equal values[0] it is [dtype,
    shape, values, bits]: the entries whose bit is set are values[1:], one each or one for all. [dtype, shape, values,
    null, gaps] has the mask in the code of `mask_gaps`, where that is smaller. Values may be stored in a narrower
    integer type than their own. `verify.unpack` reads it.
    """
    content = _packed(files, gaps=True)
    size = sum(t.numel() * t.element_size() for tensors in files.values() for t in tensors.values())
    # What is almost nothing but zeros looks like a file that was made to fill its reader's memory.
    return content if size <= verify.MOST_GROWTH * len(content) else _packed(files, gaps=False)


def _packed(files: Mapping[str, Mapping[str, Tensor]], *, gaps: bool) -> bytes:
    """With masks as bits, or by their gaps where that is smaller."""
    blobs: dict[str, Tensor] = {}
    keys: dict[bytes, str] = {}

    def stored(flat: Tensor | None) -> str | None:
        """The key of a blob with this content."""
        if flat is None:
            return None
        content = f"{flat.dtype};".encode() + flat.view(torch.uint8).numpy().tobytes()
        key = keys.setdefault(hashlib.sha256(content).digest(), str(len(keys)))
        blobs.setdefault(key, flat)
        return key

    index = {
        file: {
            name: [
                str(tensor.dtype).removeprefix("torch."),
                list(tensor.shape),
                *map(stored, _pieces(tensor, gaps=gaps)),
            ]
            for name, tensor in tensors.items()
        }
        for file, tensors in files.items()
    }
    return save_tensors(blobs, metadata={"index": json.dumps(index)})


def _pieces(tensor: Tensor, *, gaps: bool) -> tuple[Tensor | None, ...]:
    """The values of a tensor; where most are one value: that and the others, and bits or gaps that say which are."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not (flat.is_floating_point() or flat.dtype == torch.bool) and (flat >= 0).all() and (flat < 256).all():
        flat = flat.to(torch.uint8)
    # By their bytes, so that 0.0 and -0.0 stay what they are.
    words = flat.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    differs = words != (words.mode().values if len(words) else words)
    exceptions = flat[differs]
    if len(exceptions) and bool((words[differs] == words[differs][0]).all()):
        exceptions = exceptions[:1]
    if len(exceptions) * flat.element_size() + len(flat) / 8 >= 0.9 * len(flat) * flat.element_size():
        return (flat,)
    values, mask = torch.cat([flat[~differs][:1], exceptions]), differs.numpy()
    bits = torch.from_numpy(np.packbits(mask))
    if gaps and len(coded := mask_gaps(mask)) < len(bits):
        return values, None, torch.frombuffer(bytearray(coded), dtype=torch.uint8)
    return values, bits


def beside_the_claim(split: Split, declaration: str | None) -> str:
    """What the sentence says after the claim: copies that are more than 1 % of the examples, and the issuer's word."""
    repeats, n = split.repeats, len(split.bound)
    copies = f" {repeats} of the {n} bound examples are copies of others." if repeats * 100 > n else ""
    return copies if declaration is None else f'{copies} The issuer states: "{declaration}".'


def percent(delta: float) -> str:
    """100 (1 - delta) in all its digits: 95 for 0.05, and 99.999999 for 1e-8 rather than 100."""
    return f"{(100 - 100 * Decimal(f'{delta:.12g}')).normalize():f}"


def rounded_down(value: float) -> str:
    """Four digits, rounded down once 1e-6 is added for the rounding of gates: a sparsity must not be overstated."""
    return f"{math.floor(value * 1e4 + 1e-2) / 1e4:.4f}"
