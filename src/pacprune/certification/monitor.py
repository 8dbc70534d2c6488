"""Monitor: whether a deployed network still keeps what its certificate promised, example by example."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pacprune.bounds import sequential
from pacprune.bounds.numeric import check_count
from pacprune.bounds.sequential import Point, Watch
from pacprune.certification import audit
from pacprune.certification.certificate import Certificate, digest, percent, rounded_up
from pacprune.certification.decode import load
from pacprune.certification.verify import SIGNED
from pacprune.files import alone_in, write_atomically

FORMAT = 1
PATIENCE = 10.0
"""So many seconds a monitor waits for another process that writes beside its file."""


class Monitor:
    """Watches the losses of a deployed network for a risk above its certified bound, as long as you like.

    An alarm is false with probability at most alpha, however many examples arrive and however often one looks: the
    hypothesis is that the risk of every next example, given those before, is at most the limit. If the certificate is
    true and nothing changed, that holds; so an alarm without a change has a probability of at most delta + alpha. There
    is no reset. The watch goes on after an alarm, and an alarm stays.

    Examples count once each, in their order of arrival, from number 1 without a gap. `update` is told the number of its
    first example, and refuses one that it has counted already. `watch` holds what is known; after an alarm,
    `watch.alarm_at` is the number of the example that raised it.

    Args:
        certificate: A certificate, or the folder of one, which must pass `pp.verify`; its bound is the limit, and
            (1 + bound)/2 where the bound is on a drop. Or the limit itself, a number between 0 and 1.
        alpha: Probability with which there is ever a false alarm, and with which the interval ever misses.
        path: File that keeps the state, a small JSON file that is never half written. If it exists, the monitor goes
            on from it. None keeps the state in memory alone.

    Raises:
        ValueError: If the certificate is refused, or the file belongs to another certificate, limit or alpha.

    Example:
        >>> monitor = pp.Monitor(0.10, path="monitor.json")
        >>> watch = monitor.update([0, 0, 1, 0, 0, 0, 0, 0, 0, 0], first=1)
        >>> watch.examples, watch.alarm_at
        (10, None)
        >>> watch = pp.Monitor(0.10, path="monitor.json").update([1] * 6, first=11)
        >>> watch.alarm_at
        16
    """

    def __init__(
        self, certificate: Certificate | str | Path | float, *, alpha: float = 0.05, path: str | Path | None = None
    ) -> None:
        limit, self._identity, self.delta, self._signed = _promise(certificate)
        self.watch = Watch(limit, float(alpha))
        self.path = None if path is None else Path(path)
        self._read()

    def update(self, values: ArrayLike | Tensor, *, first: int) -> Watch:
        """Counts new examples, and writes the state before it returns.

        Args:
            values: The losses in [0, 1], in the order of arrival: 1 for an error and 0 for none, a bounded loss, or 1
                where two networks disagree. For a certified drop, the differences in [-1, 1]: 1 where the network alone
                is wrong, -1 where the reference alone is, else 0.
            first: Number of the first of these examples, counted from 1 since the monitor began. It is what tells new
                examples from those that were counted before.

        Returns:
            What is known now: `examples`, `alarm_at`, and `point` with the mean and the interval.

        Raises:
            ValueError: If a value lies outside [0, 1] (of a drop: is not -1, 0 or 1; of one per document: lies outside
                [-1, 1]), if there is none, if an example
                has several, or if the examples are not the next ones.
        """
        if self.path is None:
            self.watch = self._update(values, first)
            return self.watch
        with alone_in(self.path.parent, PATIENCE):  # from reading to writing, so that nothing is lost in between
            self._read()
            watch = self._update(values, first)
            write_atomically(self.path, (json.dumps(self._header() | asdict(watch)) + "\n").encode())
        self.watch = watch
        return watch

    def _update(self, values: ArrayLike | Tensor, first: int) -> Watch:
        """What is known once new examples are counted."""
        x = self._values(values.detach().cpu().numpy() if isinstance(values, Tensor) else values)
        first = check_count("first", first)
        counted, last = self.watch.examples, first + x.size - 1
        if first <= counted:
            raise ValueError(
                f"the batch has examples {first:,} to {last:,}, but examples 1 to {counted:,} are counted already: "
                f"give those from {counted + 1:,} on"
            )
        if first > counted + 1:
            raise ValueError(
                f"the batch begins with example {first:,}, but the next one is {counted + 1:,}: give the examples "
                "between them first, since leaving some out voids the alarm"
            )
        return sequential.advance(self.watch, x)

    def _values(self, values: ArrayLike) -> np.ndarray:
        """One value in [0, 1] for every example; a difference D becomes (1 + D)/2."""
        array = np.asarray(values, dtype=np.float64)
        if array.ndim > 1 and array[:1].size != 1:
            raise ValueError(
                f"the values have the shape {array.shape}, but there is one value for each example: take the mean of "
                "each row"
            )
        if self._signed is None:
            return sequential.check_values(array)
        array = array.reshape(-1)
        if self._signed != "drop":
            bad = np.flatnonzero(~(np.abs(array) <= 1.0))
            if bad.size:
                raise ValueError(
                    f"value {bad[0] + 1} of the batch is {array[bad[0]]:g}, but a {self._difference} is watched by "
                    "differences in [-1, 1]: give each document's loss less that of the reference"
                )
            return sequential.check_values((1.0 + array) / 2.0)
        bad = np.flatnonzero(~np.isin(array, (-1.0, 0.0, 1.0)))
        if bad.size:
            raise ValueError(
                f"value {bad[0] + 1} of the batch is {array[bad[0]]:g}, but a drop is watched by differences: give 1 "
                "where the network alone is wrong, -1 where the reference alone is, else 0"
            )
        return sequential.check_values((1.0 + array) / 2.0)

    @property
    def _difference(self) -> str:
        """What a difference to the reference is called."""
        return "rise" if str(self._signed).endswith("rise") else "drop"

    @property
    def statement(self) -> str:
        """What is known now, for a reader."""
        return "\n".join([self._verdict(), self._error(), self._interval()])

    def __repr__(self) -> str:
        watch = self.watch
        return f"Monitor(limit {watch.limit:.4f}, {watch.examples:,} examples, alarm_at {watch.alarm_at})"

    def _verdict(self) -> str:
        watch = self.watch
        limit = f"the {'limit' if self.delta is None else 'certified'} {rounded_up(watch.limit)}"
        if self._signed is not None:
            limit += f", that is a {self._difference} of {rounded_up(2.0 * watch.limit - 1.0)}"
        if watch.alarm_at is not None:
            return f"ALARM at example {watch.alarm_at:,} of {watch.examples:,}: the risk has exceeded {limit}."
        wealth = math.exp(watch.log_wealth)
        return (
            f"Quiet after {watch.examples:,} examples: nothing shows that the risk exceeds {limit} "
            f"(wealth {wealth:.3g}; the alarm is at {1 / watch.alpha:.3g})."
        )

    def _error(self) -> str:
        sentence = f"An alarm is false with probability at most {self.watch.alpha:g}, however long one watches"
        if self.delta is None:
            return f"{sentence}."
        total = f"{self.delta + self.watch.alpha:.6g}"
        return f"{sentence}; together with the certificate's delta of {self.delta:g} the error is at most {total}."

    def _interval(self) -> str:
        signed = self._signed is not None
        what, risk = (self._difference, self._difference) if signed else ("loss", "risk")
        mean, lower, upper = (2 * value - 1 if signed else value for value in self.watch.point[1:4])
        return (
            f"Mean {what} {mean:.4f}. If the {risk} is constant, it lies between {math.floor(lower * 1e4) / 1e4:.4f} "
            f"and {rounded_up(upper)}, with probability at least {percent(self.watch.alpha)} % at all times at once."
        )

    def _header(self) -> dict[str, Any]:
        return {"format": FORMAT, "certificate": self._identity}

    def _read(self) -> None:
        """Goes on from the file, which another process may have written since."""
        if self.path is None or not self.path.exists():
            return
        try:
            state: dict[str, Any] = json.loads(self.path.read_text())
            owner = {name: state.pop(name) for name in self._header()}
            state["course"] = [Point(*point) for point in state["course"]]
            state |= {name: tuple(values) for name, values in state.items() if isinstance(values, list)}
            watch = Watch(**state)
            if not sum(watch.floors) == sum(watch.ceilings) == watch.examples:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.path} is no state of a monitor: restore it, or choose another file") from None
        mine = self._header() | {"limit": self.watch.limit, "alpha": self.watch.alpha}
        theirs = owner | {"limit": watch.limit, "alpha": watch.alpha}
        for name, value in mine.items():
            if theirs[name] != value:
                raise ValueError(
                    f"{self.path} belongs to another monitor: {name} is {str(theirs[name])[:12]} there and "
                    f"{str(value)[:12]} here; use the same as before, or choose another file"
                )
        self.watch = watch


def _promise(certificate: Certificate | str | Path | float) -> tuple[float, str | None, float | None, str | None]:
    """The limit, and of a certificate what identifies it (however it was saved), its delta, and its risk if signed.

    Of a difference D in [-1, 1], (1 + D)/2 is watched.
    """
    if isinstance(certificate, str | Path):
        report = audit.verify(certificate)
        if not report.valid:
            raise ValueError(
                f"the certificate in {certificate} is refused ({report.failure}): watch one that pp.verify accepts"
            )
        certificate = load(certificate)
    if not isinstance(certificate, Certificate):
        return sequential.check_limit(certificate), None, None, None
    content = {name: value for name, value in certificate.record.items() if name != "files"}
    record = certificate.record
    _refuse_partial_groups(certificate)
    signed = record["risk"]["name"] if record["kind"] == "risk" and record["risk"]["name"] in SIGNED else None
    limit = certificate.bound if signed is None else (1.0 + certificate.bound) / 2.0
    return sequential.check_limit(limit), digest(content), certificate.ledger.delta, signed


def _refuse_partial_groups(certificate: Certificate) -> None:
    """Bounds on groups bound the risk on all examples only where every example is in one group, and in no other."""
    examples = certificate.tensors.get("examples.safetensors", {})
    masks = [mask for name, mask in examples.items() if name.startswith("group/")]
    count = int((torch.stack(masks).sum(0) != 1).sum()) if masks else 0
    if count:
        raise ValueError(
            f"{count} of the {certificate.n} bound examples are in no group of the certificate, or in several, so that "
            "it bounds no risk on all examples: watch a certificate without groups"
        )
