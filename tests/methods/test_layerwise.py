"""`pp.layerwise`: blocks are streamed as if they were not, counts are exact, and what cannot be done is refused."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from memory import live_bytes
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pacprune as pp
from pacprune.data import trace
from pacprune.masking import calibration, masks, patterns, solvers, weights
from pacprune.masking.solvers import SOLVERS, Target
from pacprune.methods import layerwise as module
from pacprune.methods.layerwise import layerwise

G = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, 50, (20, 12), generator=G)
EXACT = {"rtol": 1e-4, "atol": 1e-5}


def gpt() -> nn.Module:
    return pp.models.gpt(50, width=32, depth=3, heads=2, context=12, dropout=0.1)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


class Sliding(nn.Module):
    """Blocks with keyword arguments that differ from block to block, and tuples as outputs."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden: Tensor, *, shift: Tensor, cache: list[Tensor] | None = None) -> tuple[Tensor, Any]:
            if cache is not None:
                cache.append(hidden)
            out = hidden + torch.relu(self.linear(hidden + shift + (len(cache) if cache is not None else 0)))
            return out, object()

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList(self.Block() for _ in range(4))
        self.norm, self.classifier = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, cache = self.embedding(tokens), []
        for i, layer in enumerate(self.layers):
            hidden, _ = layer(hidden, shift=torch.full((), float(i)), cache=cache if i == 0 else None)
        return self.classifier(self.norm(hidden))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt": (gpt, "blocks.{}."),
    "llama": (llama, "model.layers.{}."),
    "gpt2": (gpt2, "transformer.h.{}."),
    "sliding": (Sliding, "layers.{}."),
}


def unstreamed(model: nn.Module, prefix: str, *, solver: str, sparsity: float | None, pattern: str | None) -> None:
    """Prunes block after block, each on what the whole network, as it then is, gives it."""
    model.eval()
    row, layers = SOLVERS[solver], calibration.layers_of(model)
    names = [[n for n in layers if n.startswith(prefix.format(i))] for i in range(len(layers))]
    sizes = {n: layers[n][0].weight.numel() for part in names for n in part}
    outside = [n for n in ("classifier.weight",) if n in layers]
    sizes |= {n: layers[n][0].weight.numel() for n in outside}
    goal = patterns.sparsity(pattern) if pattern else sparsity
    counts = masks.layer_counts(sizes, float(goal or 0))
    for part in [*[names for names in names if names], *([outside] if outside else [])]:
        with torch.no_grad(), calibration.recorded({n: layers[n] for n in part}, row.measure or float) as sums:
            for batch in TOKENS.split(module.BATCH_SIZE):
                model(batch)
        for name in part:
            layer = layers[name][0]
            target = Target(counts[name], patterns.parse(pattern) if pattern else None, 0.01)
            result, _ = row.solve(layer.matrix(layer.weight.detach()), sums[name], target)
            with torch.no_grad():
                layer.weight.copy_(layer.stored(result))


@pytest.mark.parametrize(("sparsity", "pattern"), [(0.6, None), (None, "2:4")])
@pytest.mark.parametrize("solver", ["wanda", "sparsegpt", "alps"])
@pytest.mark.parametrize("case", CASES)
def test_streaming_equals_pruning_the_whole_network_block_after_block(
    case: str, solver: str, sparsity: float | None, pattern: str | None
) -> None:
    make, prefix = CASES[case]
    if pattern and case == "gpt2":
        pytest.skip("its layers store their weights the other way round")
    model, whole = seeded(make), seeded(make)
    result = layerwise(model, TOKENS, solver=solver, sparsity=sparsity, pattern=pattern)
    unstreamed(whole, prefix, solver=solver, sparsity=sparsity, pattern=pattern)
    for name, expected in whole.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected, **EXACT)
    for name, keep in result.mask.items():
        assert torch.equal(model.get_parameter(name) != 0, keep)
    assert [name for name in result.mask if not name.startswith(prefix.partition("{")[0])] == (
        ["classifier.weight"] if case == "sliding" else []  # an output layer of another size than the vocabulary
    )
    assert model.training
    assert not any("forward" in part.__dict__ for part in model.modules())


@pytest.mark.parametrize("case", CASES)
def test_one_block_at_a_time_is_on_the_device_and_runs_there(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, prefix = CASES[case]
    model, real = seeded(make), module._on
    blocks: list[nn.Module] = list(model.get_submodule(prefix.partition(".{}")[0]))  # type: ignore[call-overload]
    there: list[int] = []
    calls: list[int] = []

    @contextmanager
    def watched(part: nn.Module, *args: Any, **options: Any) -> Iterator[None]:
        inside = [i for i, block in enumerate(blocks) if block is part]
        there.extend(inside)
        try:
            with real(part, *args, **options):
                yield
        finally:
            del there[len(there) - len(inside) :]

    def called(i: int) -> None:
        assert there == [i]
        calls.append(i)

    monkeypatch.setattr(module, "_on", watched)
    for i, block in enumerate(blocks):
        next(block.children()).register_forward_hook(lambda *_, i=i: called(i))
    layerwise(model, TOKENS, solver="wanda", sparsity=0.5)
    # Once to see what it gives; then, for 3 batches, for its inputs and, if another part follows, for its outputs.
    last = 6 if case == "sliding" else 3
    assert there == []
    assert calls == [0, *[0] * 6, *[i for i in range(1, len(blocks) - 1) for _ in range(6)], *[len(blocks) - 1] * last]


def test_after_an_error_no_block_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    real, there = module._on, []

    @contextmanager
    def watched(part: nn.Module, *args: Any, **options: Any) -> Iterator[None]:
        there.append(part)
        try:
            with real(part, *args, **options):
                yield
        finally:
            there.remove(part)

    def fail(*args: Any) -> Any:
        raise KeyError

    monkeypatch.setattr(module, "_on", watched)
    monkeypatch.setitem(SOLVERS, "wanda", solvers.Solver(fail, SOLVERS["wanda"].measure))
    with pytest.raises(KeyError) as error:
        layerwise(gpt(), TOKENS, solver="wanda", sparsity=0.5)
    assert error.value is not None  # whose traceback keeps all frames alive
    assert there == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_prunes_a_network_that_stays_on_the_host(case: str, solver: str) -> None:
    model, alone = (seeded(CASES[case][0]).double() for _ in range(2))
    result = layerwise(model, TOKENS, solver=solver, sparsity=0.6, device="cuda")
    layerwise(alone, TOKENS, solver=solver, sparsity=0.6)
    assert {p.device.type for p in (*model.parameters(), *model.buffers(), *result.mask.values())} == {"cpu"}
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-6, atol=1e-8)


def test_memory_is_that_of_one_block_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    extra, row = {}, SOLVERS["sparsegpt"]
    for depth in (2, 6):
        model = pp.models.gpt(50, width=32, depth=depth, heads=2, context=12)
        before, solved = live_bytes(), []

        def solve(*args: Any, depth: int = depth, before: int = before, solved: list[int] = solved) -> Any:
            solved.append(args[0].numel())
            if len(solved) == 4 * depth - 3:  # the first layer of the last block: all its moments are there
                extra[depth] = live_bytes() - before - sum(solved[:-1])  # masks have a byte per weight
            return row.solve(*args)

        monkeypatch.setitem(SOLVERS, "sparsegpt", solvers.Solver(solve, row.measure))
        layerwise(model, TOKENS, sparsity=0.5)
    # The moments of a block of width 32: 3 layers with 32 inputs and one with 128.
    moments = 4 * (3 * 32**2 + 128**2)
    assert moments < extra[2] < 2.5 * moments
    assert extra[6] < extra[2] + 0.1 * moments


# --- What is pruned, and how much.


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("sparsity", [0.0, 0.333, 0.5, 0.97])
def test_the_sparsity_is_exact(solver: str, sparsity: float) -> None:
    model = gpt()
    result = layerwise(model, TOKENS, solver=solver, sparsity=sparsity)
    size = sum(keep.numel() for keep in result.mask.values())
    assert size == 3 * 12 * 32**2
    assert sum(int(keep.sum()) for keep in result.mask.values()) == round((1 - sparsity) * size)
    for keep in result.mask.values():
        assert abs(int(keep.sum()) - (1 - sparsity) * keep.numel()) <= 1
    before = {name: weight.clone() for name, weight in pp.prunable(model).items()}
    pp.fit(model, (TOKENS[:, :-1], TOKENS[:, 1:]), pp.Config(epochs=1, lr=0.01), loss=pp.models.next_character)
    for name, keep in result.mask.items():
        assert not model.get_parameter(name)[~keep].any()
        assert not torch.equal(model.get_parameter(name), before[name])


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("pattern", patterns.PATTERNS)
def test_every_group_keeps_n_of_m(solver: str, pattern: str) -> None:
    result = layerwise(gpt(), TOKENS, solver=solver, pattern=pattern)
    assert result.pattern == pattern  # which checks masks and weights
    assert result.selected_sparsity == patterns.sparsity(pattern)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_of_weights_stay_what_they_are(solver: str, dtype: torch.dtype) -> None:
    model = seeded(gpt).to(dtype)
    result = layerwise(model, TOKENS, solver=solver, pattern="2:4")
    assert {p.dtype for p in model.parameters()} == {dtype}
    for name, keep in result.mask.items():
        assert torch.equal(model.get_parameter(name) != 0, keep)


def test_layers_can_have_sparsities_of_their_own() -> None:
    result = layerwise(gpt(), TOKENS, sparsity={"blocks.0": 0.25, "*.hidden": 0.75})
    assert {name: float(1 - keep.float().mean()) for name, keep in result.mask.items()} == {
        **{f"blocks.0.{name}.weight": 0.25 for name in ("attention", "attention_out", "hidden", "hidden_out")},
        **{f"blocks.{i}.hidden.weight": 0.75 for i in (1, 2)},
    }


def test_include_exclude_and_prunable_choose_weights() -> None:
    assert list(layerwise(gpt(), TOKENS, sparsity=0.5, include="blocks.1").mask) == [
        f"blocks.1.{name}.weight" for name in ("attention", "attention_out", "hidden", "hidden_out")
    ]
    assert len(layerwise(gpt(), TOKENS, sparsity=0.5, exclude=["*.hidden", "*_out"]).mask) == 3
    result = layerwise(
        gpt(), TOKENS, sparsity=0.1, prunable=lambda model: {"blocks.2.hidden.weight": model.blocks[2].hidden.weight}
    )
    assert round(result.sparsity, 3) == 0.1  # of all
    assert list(result.mask) == ["blocks.2.hidden.weight"]


def test_frozen_weights_are_left_alone_unless_they_are_named() -> None:
    model: Any = gpt()
    model.blocks[0].requires_grad_(False)
    assert len(layerwise(model, TOKENS, sparsity=0.5).mask) == 8
    assert len(layerwise(model, TOKENS, sparsity=0.6, include="blocks").mask) == 12


def test_embeddings_and_the_output_layer_over_the_vocabulary_are_left_alone() -> None:
    for make in (gpt, gpt2, llama):
        model = seeded(make)
        outside = {n: p.clone() for n, p in model.named_parameters() if not any(f".{i}." in n for i in range(3))}
        result = layerwise(model, TOKENS, sparsity=0.5)
        assert len(outside) >= 3
        assert not set(result.mask) & set(outside)
        assert all(torch.equal(model.get_parameter(name), p) for name, p in outside.items())


def test_convolutions_are_pruned_and_a_network_without_blocks_is_one() -> None:
    torch.manual_seed(0)
    model = pp.models.vgg(1, 8, widths=(8, 16))
    images = torch.randn(16, 1, 8, 8)
    dense = copy.deepcopy(model).eval()
    errors = {}
    for solver in SOLVERS:
        pruned = copy.deepcopy(model)
        result = layerwise(pruned, (images, torch.zeros(16)), solver=solver, sparsity=0.5)
        assert result.sparsity == pytest.approx(0.5, abs=1e-5)
        with torch.no_grad():
            errors[solver] = float((pruned.eval()(images) - dense(images)).norm())
    assert errors["sparsegpt"] < errors["magnitude"]


@pytest.mark.parametrize("kind", ["mixer", "vit"])
def test_layers_outside_of_the_blocks_come_last(kind: str) -> None:
    make = pp.models.mixer if kind == "mixer" else pp.models.vit
    model = make(1, 8, patch=2, width=16, depth=3)
    exclude = "places" if kind == "vit" else None
    result = layerwise(model, (torch.randn(16, 1, 8, 8), torch.zeros(16)), sparsity=0.5, exclude=exclude)
    assert {"patches.weight", "head.weight"} < set(result.mask)
    assert list(result.mask) == [name for name in pp.prunable(model) if name != "places"]


NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
    "the old spectral_norm": torch.nn.utils.spectral_norm,
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_head_whose_weight_is_computed_can_be_left_out(norm: str) -> None:
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), NORMS[norm](nn.Linear(16, 50)))
    with pytest.raises(ValueError, match="leave it out by exclude="):
        layerwise(model, TOKENS, sparsity=0.5)
    assert list(layerwise(model, TOKENS, sparsity=0.5, exclude="2*").mask) == ["1.weight"]


def test_computed_weights_that_no_sparsity_is_asked_of_are_left_alone() -> None:
    model = nn.Sequential(NORMS["weight_norm"](nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(40, 8)
    assert list(layerwise(model, x, sparsity={"2.weight": 0.5}).mask) == ["2.weight"]
    with pytest.raises(ValueError, match=r"0\.weight is parametrized by _WeightNorm"):
        layerwise(model, x, sparsity=0.5)


# --- Data.


class Texts(Dataset[dict[str, Tensor]]):
    """Mappings of a model's arguments."""

    def __len__(self) -> int:
        return len(TOKENS)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": TOKENS[i], "attention_mask": (torch.arange(12) < 8 + i % 4).long(), "labels": TOKENS[i]}


def test_batches_of_every_kind_are_the_same_calibration() -> None:
    def of(data: Any, **options: Any) -> dict[str, Tensor]:
        model = seeded(gpt)
        layerwise(model, data, solver="wanda", sparsity=0.5, **options)
        return model.state_dict()

    first = of(TOKENS)
    kinds = [
        (TOKENS, TOKENS),
        TensorDataset(TOKENS),
        TensorDataset(TOKENS, TOKENS),
        DataLoader(TensorDataset(TOKENS), batch_size=5),
        DataLoader(list(TOKENS), batch_size=20),  # type: ignore[arg-type]
    ]
    for data in kinds:
        assert all(torch.equal(first[name], t) for name, t in of(data).items())
    texts = of(DataLoader(Texts(), batch_size=8), forward=lambda model, batch: model(batch["input_ids"]))
    assert all(torch.equal(first[name], t) for name, t in texts.items())
    few = of(TOKENS[:10])
    for data in (TOKENS, DataLoader(TensorDataset(TOKENS), batch_size=8)):
        assert all(torch.equal(few[name], t) for name, t in of(data, examples=10).items())


@pytest.mark.parametrize("make", [llama, gpt2])
def test_mappings_go_to_transformers_with_their_attention_mask(make: Callable[[], nn.Module]) -> None:
    model, whole = seeded(make), seeded(make)
    layerwise(model, DataLoader(Texts(), batch_size=8), solver="wanda", sparsity=0.5)
    layerwise(whole, TOKENS, solver="wanda", sparsity=0.5)
    different = [n for n, t in whole.state_dict().items() if not torch.equal(t, model.state_dict()[n])]
    assert different  # what the mask hides is no context for other tokens


def test_a_shuffling_loader_is_read_in_one_order_and_left_as_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(TOKENS), batch_size=4, shuffle=True, generator=generator)
    states = []
    for _ in range(2):
        model = seeded(gpt)
        layerwise(model, loader, sparsity=0.5, examples=8)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], t) for name, t in states[1].items())
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())


def test_calibration_data_count_as_seen_and_no_certificate_is_issued_on_them(digits: pp.data.Split) -> None:
    few = digits.bound.subset(torch.arange(40))
    for solver in SOLVERS:
        model = pp.models.mlp(64, hidden=[16])
        pp.fit(model, digits.prior, pp.Config(epochs=0))
        result = layerwise(model, few, solver=solver, sparsity=0.5)
        seen = int(torch.isin(digits.bound.known.examples, weights.seen(model).examples).sum())
        assert (seen > 0) == (solver != "magnitude")
        assert weights.masked(model)
        assert trace.UNKNOWN_MASK not in trace.noted(result.mask.values()).labelled
        if solver != "magnitude":
            with pytest.raises(ValueError, match=r"has seen|seen 40 of"):
                pp.certify_held_out(model, digits)


def test_progress_is_told_after_every_block() -> None:
    rows: list[Any] = []
    layerwise(gpt(), TOKENS, sparsity=0.5, progress=lambda *args: rows.append(args))
    assert rows == [("layerwise", i, 3, {}) for i in (1, 2, 3)]


# --- What cannot be done.


class Skipping(nn.Module):
    """The third block also reads what the first one gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        return self.layers[2](first + self.layers[1](first))


class Chain(Skipping):
    """Block after block; what lies before them may be NaN."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.tensor([start]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[2](self.layers[1](self.layers[0](self.start * x)))


class Looping(Skipping):
    """Its blocks are called twice."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, *self.layers]:
            x = torch.relu(layer(x))
        return x


class Unreached(Skipping):
    """A layer that is never called."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


class Attention(nn.Module):
    """Reads weights past the layers that own them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


class Empty(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


ROWS = torch.randn(12, 4, generator=G)


@pytest.mark.parametrize(
    ("make", "data", "options", "message"),
    [
        (
            Skipping,
            ROWS,
            {},
            r"block 2 \(of 0 to 2\) of Skipping reads more than what the block before it gives.*pp\.osp",
        ),
        (Unreached, ROWS, {}, r"no calibration batch reached the layers of layers\.2\.weight; give more .* exclude="),
        (
            Attention,
            ROWS[None],
            {},
            r"no inputs can be recorded for attention\.in_proj_weight: only Linear .* exclude=",
        ),
        (
            Attention,
            ROWS[None],
            {"exclude": "*in_proj_weight"},
            r"no calibration batch reached the layers of attention\.out_proj\.weight",
        ),
        (gpt, TOKENS, {"include": "tokens"}, r"no inputs can be recorded for tokens\.weight"),
        (gpt, TOKENS, {"pattern": "2:4"}, r"sparsity is 0\.6, but the pattern 2:4 has sparsity 0\.5"),
        (gpt, TOKENS, {"sparsity": None, "pattern": "3:4"}, "pattern '3:4' is unknown; use one of 1:4, 2:4, 4:8"),
        (gpt, TOKENS, {"sparsity": None}, "neither a sparsity nor a pattern is given"),
        (
            lambda: nn.Linear(6, 4),
            torch.randn(9, 6),
            {"sparsity": None, "pattern": "2:4"},
            r"weight has rows of 6 weights, which cannot be cut into groups of 4; .* exclude=",
        ),
        (
            gpt2,
            TOKENS,
            {"sparsity": None, "pattern": "2:4"},
            r"c_attn\.weight lies in a Conv1D of transformers, .*Linear",
        ),
        (gpt, TOKENS, {"solver": "wandb"}, "solver 'wandb' is unknown; use one of magnitude, wanda, sparsegpt, alps"),
        (gpt, TOKENS, {"damping": -1}, "damping is -1; it is a share of the mean diagonal"),
        (gpt, TOKENS, {"examples": 0}, "examples is 0; calibration needs one at least"),
        (gpt, TOKENS[:0], {}, "the data is empty: 0 examples"),
        (lambda: nn.Linear(4, 3), Empty(), {}, "the calibration data, a Empty, gave no batch; check what it reads"),
        (lambda: nn.Linear(4, 3), ROWS * torch.nan, {}, r"the layer of weight got NaN or infinite inputs from the cal"),
        (
            Chain,
            ROWS * torch.nan,
            {},
            r"block 0 \(of 0 to 2\) of Chain cannot .* since the calibration data hold NaN",
        ),
        (lambda: Chain(torch.nan), ROWS, {}, "block 0 .* since what it is given holds NaN in batch 0; check"),
        (
            lambda: Chain().bfloat16(),
            ROWS.double(),
            {},
            "data are torch.float64, but the weights of Chain are torch.bf",
        ),
        (gpt, ("text",), {}, "data is a tuple of str"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*fast path")
def test_what_cannot_be_done_is_refused_in_one_sentence(
    make: Callable[[], nn.Module], data: Any, options: dict[str, Any], message: str
) -> None:
    model = make()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=message) as refusal:
        layerwise(model, data, **{"sparsity": 0.6, **options})
    assert "\n" not in str(refusal.value)
    if make is not Skipping:
        pairs = ((t, before[name]) for name, t in model.state_dict().items())
        assert all(bool(torch.isclose(t, other, rtol=0, atol=0, equal_nan=True).all()) for t, other in pairs)
    assert not any("forward" in part.__dict__ or part._forward_pre_hooks for part in model.modules())


def test_a_device_that_is_too_small_is_named_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(*args: Any) -> Any:
        raise torch.OutOfMemoryError

    for name in ("sparsegpt", "wanda"):
        monkeypatch.setitem(SOLVERS, name, solvers.Solver(solve, SOLVERS[name].measure))
        words = (
            "128 inputs of blocks.0.hidden_out.weight take 0.0 GB" if name == "sparsegpt" else "measured of them; give"
        )
        with pytest.raises(ValueError, match=f"cpu has too little memory for one block, .*{words}.*batch_size=1"):
            layerwise(gpt(), TOKENS, solver=name, sparsity=0.5)


def test_blocks_that_are_no_chain_are_one_block() -> None:
    model: Any = seeded(Looping)
    x = torch.randn(30, 4)
    inputs = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(x)
    both = [torch.cat([inputs[i], inputs[i + 3]]) for i in range(3)]
    expected = [
        solvers.wanda(layer.weight.detach()[None], calibration.squares(part[None]), Target(8))[1][0]
        for layer, part in zip(model.layers, both, strict=True)
    ]
    result = layerwise(model, x, solver="wanda", sparsity=0.5)
    assert all(torch.equal(keep, e) for keep, e in zip(result.mask.values(), expected, strict=True))


def test_a_model_that_was_pruned_more_is_refused() -> None:
    model = gpt()
    layerwise(model, TOKENS, sparsity=0.8)
    with pytest.raises(ValueError, match=r"was pruned to sparsity .* before"):
        layerwise(model, TOKENS, sparsity=0.5)
    assert layerwise(model, TOKENS, sparsity=0.9).selected_sparsity == pytest.approx(0.9, abs=1e-4)
