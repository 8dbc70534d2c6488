"""Exports: small, bit-exact, whole or absent; ONNX that onnxruntime runs; masks to and from torch."""

import contextlib
import copy
import json
import math
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import pacprune as pp
from pacprune import models
from pacprune.deploy import export, slim
from pacprune.files import digest


def pruned_model(name: str, sparsity: float) -> tuple[nn.Module, Tensor]:
    make, shape = {
        "mlp": (lambda: models.mlp(784), (1, 28, 28)),
        "lenet5": (models.lenet5, (1, 28, 28)),
        "resnet20": (models.resnet20, (3, 32, 32)),
    }[name]
    model = make().eval()
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=sparsity, scope="layer"))
    return model, torch.randn(3, *shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def ideal(model: nn.Module) -> float:
    """Bytes of the k kept values and of the rest, and log2 binom(D, k) bits."""
    weights = pp.prunable(model).values()
    size, kept = sum(w.numel() for w in weights), sum(int(w.count_nonzero()) for w in weights)
    choices = math.lgamma(size + 1) - math.lgamma(kept + 1) - math.lgamma(size - kept + 1)
    zeros = sum(w.element_size() * (w.numel() - int(w.count_nonzero())) for w in weights)
    return slim.size(model) - zeros + choices / math.log(2) / 8


@pytest.mark.parametrize("format", export.FORMATS)
def test_every_format_is_written_whole(format: str, tmp_path: Path) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript")
    path = tmp_path / export.FORMATS[format].file
    model, example = pruned_model("mlp", 0.9)
    sentence = export.write(path, model, format=format, example=example)
    assert sentence.startswith(f"{format}: {path.stat().st_size:,} bytes in {path}")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet20"])
@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.95, 0.99])
def test_a_packed_file_is_small_and_bit_exact(name: str, sparsity: float, dtype: torch.dtype, tmp_path: Path) -> None:
    model = pruned_model(name, sparsity)[0].to(dtype)
    path = tmp_path / "packed.safetensors"
    export.save(path, model)
    assert path.stat().st_size <= 1.03 * ideal(model) + 1024
    state, back = model.state_dict(), export.load(path)
    assert list(back) == list(state)
    assert all(same_bits(back[key], state[key]) for key in state)
    model.load_state_dict(back)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["version"], len(metadata["sha256"])) == ("pacprune packed", "2", 64)
    assert float(metadata["sparsity"]) == pytest.approx(pp.sparsity(model), abs=1e-6)


def test_a_packed_file_is_read_tensor_by_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pruned_model("resnet20", 0.9)
    export.save(tmp_path / "packed", model)
    packed = export.Packed(tmp_path / "packed")
    read, handle = [], packed._file

    class Spy:
        def get_slice(self, part: str) -> "Spy":
            self.part = handle.get_slice(part)
            return self

        def __getitem__(self, place: slice) -> Tensor:
            read.append(self.part[place])
            return read[-1]

    monkeypatch.setattr(packed, "_file", Spy())
    name = "14.weight"
    assert same_bits(packed[name], model.state_dict()[name])
    assert sum(t.numel() * t.element_size() for t in read) <= 64 * 10 * 4 * 0.1 + 64 * 10 / 8 + 4
    assert len(packed) == len(model.state_dict())
    assert list(packed) == list(model.state_dict())
    with pytest.raises(KeyError):
        packed["no such tensor"]


def test_odd_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    weight = torch.zeros(7, 9)
    weight[0, :6] = torch.tensor([-2.0, float("nan"), float("inf"), 1e-45, -1.5, -448.0])
    state = {
        "odd": weight,
        "eight": weight.to(torch.float8_e5m2),
        "no sign of zero": weight.to(torch.float8_e4m3fnuz),  # in which NaN is what -0.0 is elsewhere
        "no zero": torch.zeros(9, 9, dtype=torch.uint8).fill_diagonal_(128).view(torch.float8_e8m0fnu),
        "minus zero": torch.tensor([-0.0]),
        "double": weight.double(),
        "all zero": torch.zeros(3, 3),
        "none": torch.zeros(0, 4),
        "full": torch.ones(3, 3),
        "number": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "strided": torch.eye(6)[:, ::2],
        "transposed": (torch.eye(3) * 2).half().T,
    }
    export.save(tmp_path / "odd", state)
    back = export.load(tmp_path / "odd")
    assert list(back) == list(state)
    assert all(same_bits(back[key], state[key].contiguous()) for key in state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_minus_zero_counts_as_zero(dtype: torch.dtype, tmp_path: Path) -> None:
    """Masks of other tools leave it wherever a negative weight was."""
    weight = torch.randn(60, 70)
    keep = weight.abs() > 1.6
    signed, unsigned = (weight * keep).to(dtype), torch.where(keep, weight, 0.0).to(dtype)
    assert not same_bits(signed, unsigned)
    export.save(tmp_path / "signed", {"w": signed, "too small to pack": -torch.zeros(1, 1)})
    export.save(tmp_path / "unsigned", {"w": unsigned, "too small to pack": torch.zeros(1, 1)})
    signed_file, unsigned_file = (export.Packed(tmp_path / name) for name in ("signed", "unsigned"))
    assert signed_file.metadata == unsigned_file.metadata
    assert signed_file.path.stat().st_size == unsigned_file.path.stat().st_size
    assert same_bits(export.load(tmp_path / "signed")["w"], unsigned)


def version_1(path: Path, weight: Tensor) -> None:
    """A file as the first version of the format had it: bits, and the sign of every zero."""
    keep = weight != 0
    pack = lambda bits: torch.from_numpy(np.packbits(bits.numpy()))  # noqa: E731
    layout = zlib.compress(json.dumps([["w", list(weight.shape), "float32", int(keep.sum()), True, None]]).encode())
    parts = {"mask": pack(keep.flatten()), "kept.float32": weight[keep], "minus": pack(weight[~keep].signbit())}
    parts["layout"] = torch.frombuffer(bytearray(layout), dtype=torch.uint8)
    metadata = {"format": "pacprune packed", "version": "1", "sha256": digest({"w": weight})}
    save_file(parts, path, metadata=metadata)


def test_files_of_the_first_version_are_read(tmp_path: Path) -> None:
    weight = torch.randn(8, 9)
    weight = weight * (weight.abs() > 1)
    version_1(tmp_path / "old", weight)
    assert same_bits(export.load(tmp_path / "old")["w"], weight)


def test_a_tied_weight_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(500, 40), "head": nn.Linear(40, 500, bias=False)})
    model["head"].weight = model["embed"].weight
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.9))
    export.save(tmp_path / "tied", model)
    assert (tmp_path / "tied").stat().st_size <= 1.03 * (2000 * 4 + 0.469 * 20_000 / 8) + 1024
    back = export.load(tmp_path / "tied")
    assert back["head.weight"] is back["embed.weight"]
    assert same_bits(export.Packed(tmp_path / "tied")["head.weight"], model["embed"].weight)
    model.load_state_dict(back)
    export.save_dense(tmp_path / "dense", model)
    model.load_state_dict(load_file(tmp_path / "dense"))


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    model, _ = pruned_model("lenet5", 0.9)
    path = tmp_path / "packed"
    export.save(path, model)
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged.*export it again"):
        export.load(path)
    path.write_bytes(content[:-5])
    with pytest.raises(ValueError, match=r"cannot be read as safetensors .* export it again"):
        export.load(path)
    export.save_dense(path, model)
    with pytest.raises(
        ValueError, match=r"has format None version None, not 'pacprune packed' version 1 or 2; read plain"
    ):
        export.load(path)
    with pytest.raises(ValueError, match="is not a file; name one"):
        export.load(tmp_path / "none")
    with pytest.raises(ValueError, match=r"holds neither model.safetensors nor .*; name a folder"):
        export.load(tmp_path)


def test_dense_is_the_plain_state_dict(tmp_path: Path) -> None:
    model, x = pruned_model("lenet5", 0.9)
    export.write(tmp_path / "dense", model, format="dense", example=x)
    assert all(same_bits(t, model.state_dict()[n]) for n, t in load_file(tmp_path / "dense").items())


@pytest.mark.parametrize("name", ["mlp", "lenet5"])
def test_a_slim_file_runs_without_pacprune(name: str, tmp_path: Path) -> None:
    model, x = pruned_model(name, 0.995)
    with torch.no_grad():
        for weight in pp.prunable(model).values():
            weight[0] = 0
    sentence = export.write(tmp_path / "slim.pt2", model, format="slim", example=x)
    assert "channels and columns removed" in sentence
    loaded = torch.export.load(tmp_path / "slim.pt2")
    with torch.no_grad():
        for batch in (x, x[:1]):
            assert torch.allclose(loaded.module()(batch), model(batch), atol=1e-5)
    assert str(Path(export.__file__).parents[3]).encode() not in (tmp_path / "slim.pt2").read_bytes()


@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet20"])
def test_onnxruntime_gives_the_same_outputs(name: str, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, x = pruned_model(name, 0.95)
    for network in (model, slim.slim(model, x).model):
        export.save_onnx(tmp_path / "net.onnx", network, x)
        assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]
        session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
        for batch in (x, x[:1], torch.cat([x, x])):
            (outputs,) = session.run(["output"], {"input": batch.numpy()})
            with torch.no_grad():
                assert torch.allclose(torch.from_numpy(outputs), network(batch), atol=1e-5)


def test_a_language_model_becomes_onnx_for_any_batch_and_length(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = models.gpt(20, width=16, depth=1, heads=2, context=12)
    pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.8))
    tokens = torch.randint(20, (1, 5))
    sentence = export.write(tmp_path / "net.onnx", model, format="onnx", example=tokens)
    assert sentence.endswith("bytes in " + str(tmp_path / "net.onnx"))
    assert model.training
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    model.eval()
    for x in (tokens, torch.randint(20, (3, 12)), torch.randint(20, (2, 1))):
        (outputs,) = session.run(["output"], {"input": x.numpy()})
        with torch.no_grad():
            assert torch.allclose(torch.from_numpy(outputs), model(x), atol=1e-5)


class Named(nn.Module):
    """Takes two inputs by name, and gives a mapping, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"hidden": y, "logits": y if scale is None else y * scale}


def test_named_inputs_and_outputs_keep_their_meaning(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = Named().eval()
    inputs = {"scale": torch.rand(2, 1), "x": torch.randn(2, 4)}
    export.save_onnx(tmp_path / "net.onnx", model, inputs)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    batch = {"x": torch.randn(5, 4), "scale": torch.rand(5, 1)}
    (outputs,) = session.run(["output"], {name: tensor.numpy() for name, tensor in batch.items()})
    assert np.allclose(outputs, model(**batch)["logits"].detach().numpy(), atol=1e-6)
    export.save_program(tmp_path / "net.pt2", model, batch["x"])
    scores = torch.export.load(tmp_path / "net.pt2").module()(batch["x"][:3])
    assert torch.allclose(scores, model(batch["x"][:3])["logits"])
    with pytest.raises(ValueError, match=r"^slim takes networks with one input, but the example has scale and x; use"):
        export.write(tmp_path / "slim", model, format="slim", example=inputs)
    assert not (tmp_path / "slim").exists()


def test_what_onnx_has_not_is_one_sentence_and_no_file(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")

    class Bessel(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j0(super().forward(x))

    with pytest.raises(ValueError, match=r"^Bessel cannot be written as ONNX \(.*bessel_j0.*\); rewrite .* slim$") as e:
        export.save_onnx(tmp_path / "net.onnx", Bessel(3, 2), torch.randn(2, 3))
    assert "\n" not in str(e.value)
    assert list(tmp_path.iterdir()) == []


def test_a_length_that_a_model_fixes_is_known() -> None:
    tokens = torch.randint(20, (2, 7))
    assert slim.fixed_lengths(slim.trace(models.lstm(20, 3, width=4, tokens=True), tokens)) == [7]
    assert slim.fixed_lengths(slim.trace(nn.Embedding(20, 4), tokens)) == []
    assert slim.fixed_lengths(slim.trace(nn.Linear(7, 4), torch.randn(2, 7))) == []


def test_a_refused_export_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = pruned_model("lenet5", 0.9)
    for format, error, message in (
        ("zip", None, r"^format 'zip' is unknown; use one of safetensors, onnx, dense, slim$"),
        ("onnx", ImportError("none"), r'^onnx cannot be imported \(none\); pip install "pacprune\[export\]"$'),
    ):
        if error:
            monkeypatch.setattr("importlib.import_module", lambda name, error=error: _raise(error))
        with pytest.raises(ValueError, match=message):
            export.write(tmp_path / "file", model, format=format, example=x)
    with pytest.raises(ValueError, match="is a folder; name a file"):
        export.write(tmp_path, model, format="dense", example=x)
    pp.attach(model, pp.isotropic(model, sparsity=0.5))
    for format in ("safetensors", "dense", "slim"):
        with pytest.raises(ValueError, match=r"has a stochastic mask.*pp.harden"):
            export.write(tmp_path / "file", model, format=format, example=x)
    assert list(tmp_path.iterdir()) == []


def _raise(error: Exception) -> None:
    raise error


def test_masks_survive_torch_prune_and_back() -> None:
    model, x = pruned_model("lenet5", 0.9)
    plain, expected = {n: t.clone() for n, t in model.state_dict().items()}, model(x)
    mask = {name: weight != 0 for name, weight in pp.prunable(model).items()}
    assert export.to_torch_prune(model) is model
    assert prune.is_pruned(model)
    assert torch.equal(model[0].weight_mask.bool(), mask["0.weight"])
    assert torch.equal(model(x), expected)
    back = export.from_torch_prune(model)
    assert list(model.state_dict()) == list(plain)
    assert all(same_bits(t, plain[n]) for n, t in model.state_dict().items())
    assert back.keys() == mask.keys()
    assert all(torch.equal(back[name], mask[name]) for name in mask)
    assert not prune.is_pruned(model)


def test_masks_of_torch_prune_are_kept_by_fit(digits: pp.data.Split) -> None:
    model = models.mlp(64)
    for module in list(model.layers)[::2]:
        prune.l1_unstructured(module, "weight", amount=0.8)
    prune.random_unstructured(model.layers[0], "bias", amount=0.5)
    mask = export.from_torch_prune(model)
    assert set(mask) == set(pp.prunable(model))
    assert pp.sparsity(model) == pytest.approx(0.8, abs=1e-4)
    pp.fit(model, digits.prior, pp.Config(epochs=1, lr=0.1))
    assert all(bool((w[~mask[name]] == 0).all()) for name, w in pp.prunable(model).items())
    with pytest.raises(ValueError, match=r"^MLP has no masks of torch.nn.utils.prune .* prune it first"):
        export.from_torch_prune(model)


def test_a_kept_weight_of_zero_stays_kept_and_tied_weights_stay_tied() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    mask = {"embed.weight": torch.rand(6, 4) < 0.5}
    mask["embed.weight"][0] = True
    pp.apply_mask(model, mask)
    with torch.no_grad():
        model["embed"].weight[0, 0] = 0
    again = export.from_torch_prune(export.to_torch_prune(copy.deepcopy(model)))
    assert torch.equal(again["embed.weight"], mask["embed.weight"])
    pruned = export.to_torch_prune(model)
    export.from_torch_prune(pruned)
    assert pruned["head"].weight is pruned["embed"].weight


def test_the_file_describes_its_layout(tmp_path: Path) -> None:
    """A reader without pacprune: safetensors, zlib, json and numpy are enough."""
    weight = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 3.0]])
    sparse = torch.zeros(10, 10)
    sparse[[0, 3, 9], [0, 7, 8]] = torch.tensor([4.0, 5.0, 6.0])
    export.save(tmp_path / "packed", {"w": weight, "s": sparse, "b": torch.ones(2)})
    parts = load_file(tmp_path / "packed")
    layout = json.loads(zlib.decompress(parts["layout"].numpy().tobytes()))
    assert layout == [
        ["w", [2, 3], "float32", 2, False, None, None],
        ["s", [10, 10], "float32", 3, False, None, 9],
        ["b", [2], "float32", None, False, None, None],
    ]
    mask = parts["mask"].numpy()
    bits = np.unpackbits(mask[:1], count=6).astype(bool)
    assert bits.tolist() == (weight != 0).reshape(-1).tolist()
    r, count = int(mask[1]), int.from_bytes(mask[2:7].tobytes(), "little")
    assert (r, count) == (4, 3)
    low = np.unpackbits(mask[7:9], count=12).reshape(3, 4) @ [8, 4, 2, 1]
    high = "".join(map(str, np.unpackbits(mask[9:]))).split("1")[:3]
    gaps = [16 * len(zeros) + below for zeros, below in zip(high, low, strict=True)]
    assert np.cumsum([gap + 1 for gap in gaps]).tolist() == [1, 38, 99]
    assert parts["kept.float32"].tolist() == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert parts["rest.float32"].tolist() == [1.0, 1.0]


def relaid(path: Path, change: Callable[[list[Any], dict[str, Tensor]], None]) -> Path:
    """A packed file whose layout and parts are changed."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    parts = load_file(path)
    layout = json.loads(zlib.decompress(parts["layout"].numpy().tobytes()))
    change(layout, parts)
    parts.setdefault("layout", torch.zeros(0, dtype=torch.uint8))
    if len(layout):
        content = zlib.compress(json.dumps(layout).encode())
        parts["layout"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    save_file(parts, path, metadata=metadata)
    return path


HOSTILE: dict[str, Callable[[list[Any], dict[str, Tensor]], Any]] = {
    "a shape that would fill the memory": lambda layout, parts: layout[0].__setitem__(1, [2**20, 2**19]),
    "a shape below zero": lambda layout, parts: layout[0].__setitem__(1, [-10, -10]),
    "a shape of fractions": lambda layout, parts: layout[0].__setitem__(1, [10.0, 10]),
    "a type that is none": lambda layout, parts: layout[0].__setitem__(2, "nn"),
    "too many bytes of gaps": lambda layout, parts: layout[0].__setitem__(6, 2**40),
    "no bytes of gaps": lambda layout, parts: layout[0].__setitem__(6, 0),
    "bits in place of gaps": lambda layout, parts: layout[0].__setitem__(6, None),
    "another number of values": lambda layout, parts: layout[0].__setitem__(3, 4),
    "more ones than values": lambda layout, parts: parts["mask"].__setitem__(1, 4),
    "wide gaps": lambda layout, parts: parts["mask"].__setitem__(0, 40),
    "a part that is too long": lambda layout, parts: parts.update(mask=torch.cat([parts["mask"]] * 2)),
    "a part too few": lambda layout, parts: parts.pop("mask"),
    "a part of nothing": lambda layout, parts: parts.update(other=torch.ones(5)),
    "an owner that is not there": lambda layout, parts: layout.append(["x", [], "", None, False, "y", None]),
    "lines that are too long": lambda layout, parts: layout[0].append(0),
    "no lines": lambda layout, parts: layout.__setitem__(0, 5),
    "a layout that would fill the memory": lambda layout, parts: (
        layout.clear(),
        parts.update(layout=torch.frombuffer(bytearray(zlib.compress(b" " * 2**27)), dtype=torch.uint8)),
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_refused(kind: str, tmp_path: Path) -> None:
    sparse = torch.zeros(10, 10)
    sparse[[0, 3, 9], [0, 7, 8]] = torch.tensor([4.0, 5.0, 6.0])
    export.save(tmp_path / "packed", {"s": sparse})
    relaid(tmp_path / "packed", HOSTILE[kind])
    with pytest.raises(ValueError, match=r"(is damaged|cannot be read).*export it again"):
        export.load(tmp_path / "packed")


def test_changed_bytes_are_refused_or_change_nothing(tmp_path: Path, at_full_size: bool) -> None:
    model, _ = pruned_model("lenet5", 0.97)
    export.save(tmp_path / "packed", model)
    content, state = (tmp_path / "packed").read_bytes(), model.state_dict()
    rng = random.Random(0)
    for _ in range(4000 if at_full_size else 200):
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 2, 8])):
            changed[int(len(content) * rng.random() ** rng.choice([1, 6]))] = rng.randrange(256)
        (tmp_path / "changed").write_bytes(changed)
        refused = pytest.raises(ValueError, match=r"export it again|read plain files")
        back = None
        with contextlib.suppress(pytest.fail.Exception), refused:  # no refusal is as good if nothing else has changed
            back = export.load(tmp_path / "changed")
        assert back is None or all(same_bits(back[key], state[key]) for key in state)


def test_what_is_almost_all_zero_is_written_as_bits(tmp_path: Path) -> None:
    """By its gaps it would be so small that a reader has to take it for a trap."""
    weight = torch.zeros(5000, 5000)
    weight[3, 3] = 1.0
    export.save(tmp_path / "packed", {"w": weight})
    assert (tmp_path / "packed").stat().st_size == pytest.approx(weight.numel() / 8, rel=0.01)
    assert same_bits(export.load(tmp_path / "packed")["w"], weight)
