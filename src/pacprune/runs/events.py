"""TensorBoard event files of a run: one scalar per number of an epoch, histograms of keep_prob, the figures."""

import io
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pacprune.imports import extra
from pacprune.runs import plots, store
from pacprune.training import checkpoint
from pacprune.types import Progress

EVENTS = "events"
"""Where the event files of a run lie in its folder: tensorboard --logdir RUN."""
_EDGES = np.linspace(0.0, 1.0, 51)


def write(folder: Path, *, out: Path | None = None) -> Path:
    """Writes the events of a run, finished or still going, to `out` or RUN/events; returns that folder.

    Gates are in the checkpoints of a run, which it deletes when it is finished: to see them, use `following`.
    """
    store.read_config(folder)  # refuses what is no run
    place = folder / EVENTS if out is None else out
    if place.is_dir() and any(place.iterdir()):
        raise ValueError(f"{place} already holds {len(list(place.iterdir()))} files; give another --out, or delete it")
    with _writer(place) as writer:
        finished = (folder / "result.json").exists()
        for row in store.metrics(folder) if finished else _rows_so_far(folder):
            _scalars(writer, "/".join(row[key] for key in ("method", "stage") if key in row), row)
        for path in _checkpoints(folder):
            _gates(writer, path.stem, path)
        if finished:
            _outcome(writer, folder)
    return place


@contextmanager
def following(folder: Path, progress: Progress) -> Iterator[Progress]:
    """A `progress` that also writes the events of the run in `folder` as it goes, and its figures at the end."""
    written_epochs: set[tuple[str, int]] = set()
    with _writer(folder / EVENTS) as writer:

        def update(stage: str, steps: int, total: int, row: dict[str, Any]) -> None:
            progress(stage, steps, total, row)
            if "epoch" not in row or (stage, row["epoch"]) in written_epochs:
                return
            # At the first row of an epoch, its checkpoint is already written.
            written_epochs.add((stage, row["epoch"]))
            _scalars(writer, stage.replace(": ", "/"), row)
            if steps == total:
                method, _, name = stage.rpartition(": ")
                path = folder / store.CHECKPOINTS / method / f"{name}.pt"
                if path.is_file():
                    _gates(writer, stage.replace(": ", "/"), path)

        yield update
        if written_epochs and (folder / "result.json").exists():
            _outcome(writer, folder)


@contextmanager
def _writer(place: Path) -> Iterator[Any]:
    """A SummaryWriter that makes its folder at the first event: a refused run leaves nothing behind."""
    extra("tensorboard", "track")
    from torch.utils.tensorboard import SummaryWriter

    class LazyWriter:
        writer: SummaryWriter | None = None

        def __getattr__(self, name: str) -> Any:
            self.writer = self.writer or SummaryWriter(str(place))
            return getattr(self.writer, name)

    lazy = LazyWriter()
    try:
        yield lazy
    finally:
        if lazy.writer is not None:
            lazy.writer.close()


def _scalars(writer: Any, tag: str, row: dict[str, Any]) -> None:
    for key, value in row.items():
        if isinstance(value, int | float) and key not in ("epoch", "member"):
            writer.add_scalar(f"{tag}/{key}", value, row["epoch"])


def _rows_so_far(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows that the checkpoints of an unfinished run hold."""
    for path in _checkpoints(folder):
        subfolder = path.parent.relative_to(folder / store.CHECKPOINTS)
        method = {} if subfolder == Path() else {"method": str(subfolder)}
        for history in json.loads(_content(path)["history"]):
            yield from ({**method, **row} for row in history)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / store.CHECKPOINTS).rglob("*.pt"))


def _content(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, behind its hash."""
    return torch.load(io.BytesIO(path.read_bytes()[32:]), weights_only=True, map_location="cpu")


def _gates(writer: Any, tag: str, path: Path) -> None:
    """Histograms of keep_prob, all weights and per layer, of the gates in a checkpoint; nothing where it has none."""
    content = _content(path)
    _histograms(writer, tag, checkpoint.keep_probs(content["model"]), content["epoch"])


def _histograms(writer: Any, tag: str, keep_probs: dict[str, Tensor], step: int) -> None:
    if keep_probs:
        with_all = {"all": torch.cat([p.reshape(-1) for p in keep_probs.values()]), **keep_probs}
        for name, probabilities in with_all.items():
            writer.add_histogram(f"{tag}/keep_prob/{name}", probabilities.float().numpy(), step, bins=_EDGES)


def _outcome(writer: Any, folder: Path) -> None:
    """The events of a finished run: P and Q if it has a certificate, the result's numbers and the figures."""
    certificate = plots.certificate_of(folder)
    tensors = certificate.tensors.get("distributions.safetensors", {}) if certificate else {}
    for part in ("prior", "posterior"):
        head = f"{part}/keep_prob/"
        keep_probs = {name.removeprefix(head): t for name, t in tensors.items() if name.startswith(head)}
        _histograms(writer, f"certificate/{part}", keep_probs, 0)
    for row in store.result(folder)["rows"]:
        for key, value in row.items():
            if isinstance(value, int | float):
                writer.add_scalar(f"result/{row['method']}/{key}", value, 0)
    proto = extra("tensorboard.compat.proto.summary_pb2", "track")
    for path in sorted(folder.glob("figures/*.png")):
        png = path.read_bytes()
        width, height = struct.unpack(">II", png[16:24])
        # The file as it is: add_image would decode and encode it again, by yet another package.
        image = proto.Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        value = proto.Summary.Value(tag=f"figures/{path.stem}", image=image)
        writer._get_file_writer().add_summary(proto.Summary(value=[value]), 0)
