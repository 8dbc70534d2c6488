"""Certificates about language models: documents are counted, padding is not, and what only looks like documents is
refused."""

import copy
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import pytest
import torch
from mutations import arithmetic
from torch import Tensor, nn

import pacprune as pp
from pacprune import bounds
from pacprune.bounds import montecarlo
from pacprune.certification import risks
from pacprune.certification.recount import RiskAudit
from pacprune.data import trace
from pacprune.data.splits import IGNORED

WORDS = "the network was trained on other texts alone"
COMPARED = ("token-drop", "token-loss-rise", "token-disagreement")
VOCABULARY = 12


@cache
def made() -> tuple[pp.data.Split, nn.Module, nn.Module]:
    trace._looks.clear()
    torch.manual_seed(0)
    return mutations.language()


def certify(risk: str, model: nn.Module | None = None, data: Any = None, **options: Any) -> pp.Certificate:
    split, dense, network = made()
    reference: dict[str, Any] = {"reference": dense} if risk in COMPARED else {}
    return pp.certify_held_out(model or network, data or split, risk=risk, **(reference | options))


def test_every_risk_is_the_mean_over_a_documents_tokens_without_its_padding() -> None:
    split, dense, network = made()
    with torch.no_grad():
        outputs, others = (net.eval()(split.bound.x).double() for net in (network, dense))
    expected: dict[str, list[float]] = {name: [] for name in ("token-error", "token-loss", *COMPARED)}
    for out, other, y in zip(outputs, others, split.bound.y, strict=True):
        length = int((y != IGNORED).sum())
        out, other, y = out[:length], other[:length], y[:length]
        wrong, losses = [], []
        for logits in (out, other):
            wrong.append((logits.argmax(-1) != y).double())
            loss = -logits.log_softmax(-1)[torch.arange(length), y]
            losses.append(loss.clamp_max(math.log(1e4)) / math.log(1e4))
        expected["token-error"].append(float(wrong[0].mean()))
        expected["token-loss"].append(float(losses[0].mean()))
        expected["token-drop"].append(float((wrong[0] - wrong[1]).mean()))
        expected["token-loss-rise"].append(float((losses[0] - losses[1]).mean()))
        expected["token-disagreement"].append(float((out.argmax(-1) != other.argmax(-1)).double().mean()))
    for risk, values in expected.items():
        certificate = certify(risk)
        lowest = risks.RISKS[risk].lowest
        assert certificate.risk == pytest.approx(np.mean(values), abs=(1 - lowest) / risks.LEVELS)
        shares = (np.array(values) - lowest) / (1 - lowest)
        bound = lowest + (1 - lowest) * montecarlo.betting(shares, delta=0.05)
        assert certificate.bound == pytest.approx(bound, abs=1e-4), risk
        assert certificate.n == len(split.bound) == 60
        assert "per document on new data of" in certificate.statement.replace(
            " (clipped at log 10000, in units of it)", ""
        )


@pytest.mark.parametrize("risk", ["token-error", "token-loss", *COMPARED])
def test_library_and_script_agree_at_both_levels(risk: str, tmp_path: Path) -> None:
    split, dense, network = made()
    certificate = certify(risk)
    folder = certificate.save(tmp_path / risk)
    report = arithmetic.verify(folder)
    assert report.valid, report
    assert any("no two are of one document" in line for line in report.trusted)
    other: dict[str, Any] = {"reference": dense} if risk in COMPARED else {}
    assert pp.verify(folder, split=split, model=network, **other).level == 2
    levels = certificate.tensors["examples.safetensors"]["levels/0"].double() / risks.LEVELS
    lowest = -1 if risk in arithmetic.SIGNED else 0
    bound = lowest + (1 - lowest) * arithmetic.betting(levels.numpy(), 0.05)
    assert certificate.bound == pytest.approx(bound, abs=1e-9)


def test_values_of_other_documents_are_noticed_at_level_two(tmp_path: Path) -> None:
    split, _, network = made()
    certificate = certify("token-error")
    levels = certificate.tensors["examples.safetensors"]["levels/0"]
    kept = levels.clone()
    levels[::3] = 0
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(risks, "evaluate", lambda *_, **__: risks.Sample(levels, False, 0))
            folder = certify("token-error").save(tmp_path / "forged")
    finally:
        levels.copy_(kept)
    report = pp.verify(folder, split=split, model=network)
    assert not report.valid
    assert "the values of" in str(report.failure)


def audit_of(stated: Tensor, network: nn.Module) -> RiskAudit:
    """The audit of a certificate of token errors with these levels."""
    certificate = certify("token-error", network, declare=WORDS)
    tensors = dict(certificate.tensors) | {"examples.safetensors": {"levels/0": stated}}
    record: Any = certificate.record
    forged = replace(certificate, tensors=tensors)
    return RiskAudit(forged, record, made()[0], network, None, risks.RISKS["token-error"])


def test_tokens_that_rounding_turns_are_no_fraud_and_others_are() -> None:
    """Of very many tokens some lie where rounding turns them: what they move in all is less than a few documents."""
    split, dense, network = made()
    tied: Any = copy.deepcopy(dense)
    with torch.no_grad():  # the head has the same rows: wherever the answer is 1, rounding decides that it is not 2
        tied.tokens.weight[1] = tied.tokens.weight[2]
    for subject, hangs in ((tied, True), (network, False)):
        sample = risks.evaluate(risks.RISKS["token-error"], subject, None, split.bound)
        changed = sample.values.clone()
        # In each of these documents one token that was answered by 1 or 2 is stated otherwise.
        with torch.no_grad():
            answers = subject.eval()(split.bound.x).argmax(-1)
        places = ((answers == split.bound.y) & ((answers == 1) | (answers == 2))).any(1).nonzero().flatten()[:10]
        assert len(places) > 3  # more documents than may be stated otherwise for whole values
        changed[places] += (risks.LEVELS / (split.bound.y[places] != IGNORED).sum(1)).int()
        audit = audit_of(changed, subject)
        failure = audit._levels_failure(sample)
        assert (failure is None) == hangs, failure
        everywhere = (sample.values + risks.LEVELS // 10).clamp_max(risks.LEVELS)
        assert "the values of" in str(audit_of(everywhere, subject)._levels_failure(sample))


# --- Documents and the labels of their tokens.


def test_a_tokenizers_batch_is_shifted_and_its_padding_left_out() -> None:
    batch = {
        "input_ids": torch.tensor([[5, 1, 2, 9], [3, 4, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    x, y = pp.data.documents(batch, length=3)
    assert x.tolist() == [[5, 1, 2], [3, 0, 0]]
    assert y.tolist() == [[1, 2, 9], [4, IGNORED, IGNORED]]
    labels = torch.tensor([[IGNORED, IGNORED, 2, 9], [3, 4, IGNORED, IGNORED]])
    assert pp.data.documents(batch | {"labels": labels}, length=3)[1].tolist()[0] == [IGNORED, 2, 9]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([[1, 2], [3]], "document 1 has 1 token, none of which is to be predicted"),
        ([[1, 2], []], "document 1 is empty; leave it out"),
        ([], "there are 0 documents"),
        ([[0.5, 1.0]], "give one list of token numbers"),
        ({"ids": torch.zeros(1, 2)}, "the mapping has ids, but no input_ids"),
        (
            {"input_ids": torch.ones(1, 3), "attention_mask": torch.tensor([[0, 1, 1]])},
            'padding must come last; tokenize with padding_side="right"',
        ),
        (
            {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[2, 3, IGNORED]])},
            "2 labels are neither the token at their place nor -100; give labels that are not shifted",
        ),
        (
            {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[1, 2]])},
            "give all of them as (n, length)",
        ),
    ],
)
def test_texts_that_are_no_documents_are_one_sentence(texts: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        pp.data.documents(texts, length=4)


def test_one_token_of_a_document_is_wrong_as_often_as_the_mean_over_it() -> None:
    split, _, network = made()
    x, y = split.bound.x, split.bound.y
    assert not torch.equal(pp.data.one_token(x, y, seed=0)[0], pp.data.one_token(x, y, seed=1)[0])
    classifier = pp.models.NextToken(network).eval()
    rates = torch.zeros(len(x))
    places = torch.zeros(len(x), x.shape[1])
    with torch.no_grad():
        for seed in range(300):
            inputs, labels = pp.data.one_token(x, y, seed=seed)
            rates += classifier(inputs).argmax(-1) != labels
            places[torch.arange(len(x)), (inputs >= 0).sum(1) - 1] += 1
    assert bool((places[y == IGNORED] == 0).all())
    expected = certify("token-error").risk
    assert float(rates.mean() / 300) == pytest.approx(expected, abs=5 * 0.5 / math.sqrt(300 * len(x)))
    single = pp.data.one_token(x, y)
    fixed = pp.certify_held_out(classifier, single, declare=WORDS)  # the empty end of a row is no label
    with torch.no_grad():
        wrong = int((classifier(single[0]).argmax(-1) != single[1]).sum())
    assert fixed.bound == bounds.clopper_pearson(wrong, n=len(x), delta=0.05)
    with pytest.raises(ValueError, match="document 0 has no token that counts"):
        pp.data.one_token(x, torch.full_like(y, IGNORED))
    with pytest.raises(ValueError, match="give both as"):
        pp.data.one_token(x, y[:, 0])


def test_a_language_model_has_a_pac_bayes_certificate_by_one_token_of_each_document() -> None:
    split, _, network = made()
    tokens = [pp.data.one_token(part.x, part.y) for part in (split.prior, split.bound)]
    x, y = (torch.cat(column) for column in zip(*tokens, strict=True))
    indices = torch.arange(60), torch.arange(60, 120)
    single = pp.data.split(x, y, indices=indices, split_declared_random=True)
    model = pp.models.NextToken(copy.deepcopy(network))
    pp.attach(model, pp.isotropic(model, sparsity=0.2, std=0.01))
    prior = pp.read(model)
    pp.fit_posterior(model, prior, single, pp.Config(epochs=0))
    words = "it was trained on other documents, and short contexts repeat in new ones as often"
    certificate = pp.certify(model, prior, single, draws=50, declare=words)
    assert 0 < certificate.bound <= 1
    assert certificate.n == 60


def test_labels_that_do_not_count_are_no_errors() -> None:
    split, _, network = made()
    with torch.no_grad():
        wrong = network.eval()(split.bound.x).argmax(-1) != split.bound.y
    counted = split.bound.y != IGNORED
    expected = float(wrong[counted].double().mean())
    assert pp.error(network, (split.bound.x, split.bound.y)) == expected
    assert pp.error([network, copy.deepcopy(network)], (split.bound.x, split.bound.y))[1] == expected
    with pytest.raises(ValueError, match="all labels are -100"):
        pp.error(network, (split.bound.x, torch.full_like(split.bound.y, IGNORED)))


# --- What is refused.


class Sighted(nn.Module):
    """A network without a causal mask: it answers with the token that comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * nn.functional.one_hot(x.roll(-1, 1), VOCABULARY).float()


def rows() -> tuple[Tensor, Tensor]:
    """Documents of 20 tokens, all of which count."""
    tokens = torch.randint(VOCABULARY, (80, 21), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def text_of(stride: int, length: int = 20, n: int = 80) -> tuple[Tensor, Tensor]:
    """Windows of one text."""
    text = torch.randint(VOCABULARY, (n * stride + length + 1,), generator=torch.Generator().manual_seed(2))
    cut = text.unfold(0, length + 1, stride)[:n]
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def refusal(data: Any, risk: Any = "token-error", *, model: nn.Module | None = None, **options: Any) -> str:
    with pytest.raises(ValueError, match=r"\w") as caught:
        certify(risk, model, data, **options)
    return str(caught.value)


def test_labels_that_are_not_the_next_tokens_are_refused() -> None:
    x, _ = rows()
    assert "100% of the labels are the very tokens that the network is given at their place" in refusal((x, x))
    late = torch.cat([x[:, :1], x[:, :-1]], dim=1)
    assert "are the token before their place, which the network is given" in refusal((x, late))


@pytest.mark.parametrize("ahead", [2, 5])
def test_labels_that_are_shifted_again_are_refused(ahead: int) -> None:
    x, y = rows()
    early = torch.cat([y[:, ahead - 1 :], y.new_full((len(y), ahead - 1), IGNORED)], dim=1)
    for data in ((x, early), (x, torch.cat([y[:, ahead - 1 :], x[:, : ahead - 1]], dim=1))):
        message = f"100% of the labels are the token {ahead} places after theirs, not the next one; shift them once"
        assert message in refusal(data, declare=WORDS)


def test_a_network_that_sees_its_labels_is_refused() -> None:
    x, y = rows()
    sentence = "documents change with the tokens after them, which are the labels"
    for risk in ("token-error", "token-loss", "error"):
        assert sentence in refusal((x, y), risk, model=Sighted(), declare=WORDS)
    tags = torch.randint(VOCABULARY, x.shape)
    assert certify("token-error", Sighted(), (x, tags), declare=WORDS).bound > 0.5  # no prediction: all may be seen


DISGUISES = {
    "a class that is ruled out": lambda out, x: nn.functional.pad(out, (0, 1), value=-1e9),
    "one that is out by the type's least number": lambda out, x: nn.functional.pad(out, (0, 1), value=-3.4e38),
    "one that is infinite": lambda out, x: nn.functional.pad(out, (0, 1), value=-torch.inf),
    "a huge one that varies": lambda out, x: torch.cat([out, -1e9 - 1e6 * x[..., None]], dim=-1),
    "what all classes have in common": lambda out, x: 20 + 2 * out.bfloat16(),
    "bfloat16": lambda out, x: out.bfloat16(),
    "float16": lambda out, x: out.half(),
}


SHORT = ("bfloat16", "float16")


class Disguised(Sighted):
    """The same with outputs whose size once excused whatever else changes."""

    def __init__(self, disguise: str) -> None:
        super().__init__()
        self.disguise = disguise

    def forward(self, x: Tensor) -> Tensor:
        return DISGUISES[self.disguise](super().forward(x), x)


@pytest.mark.parametrize("disguise", DISGUISES)
def test_huge_and_short_numbers_hide_no_sight_of_labels(disguise: str) -> None:
    message = refusal(rows(), model=Disguised(disguise), declare=WORDS)
    assert "documents change with the tokens after them" in message
    assert ("give the network in float32" in message) == (disguise in ("what all classes have in common", *SHORT))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_causal_network_is_certified_in_every_precision(dtype: torch.dtype) -> None:
    _, dense, _ = made()
    assert certify("token-error", copy.deepcopy(dense).to(dtype), declare=WORDS).bound <= 1


def test_a_network_that_sees_its_labels_is_refused_by_a_verifier(tmp_path: Path) -> None:
    x, y = rows()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pacprune.certification.documents.refuse_foresight", lambda *_: None)
        folder = certify("token-error", Sighted(), (x, y), declare=WORDS).save(tmp_path / "sighted")
    report = pp.verify(folder, split=(x, y), model=Sighted())
    assert "which are the labels" in str(report.failure)


def test_a_verifier_says_that_the_weights_come_from_the_certificate(tmp_path: Path) -> None:
    split, _, small = made()
    folder = certify("token-error", small, split).save(tmp_path / "small")
    other = copy.deepcopy(small)
    with torch.no_grad():
        next(other.parameters()).mul_(2)
    words = "the model that was given has other weights; those in the folder were checked"
    for model, said in ((small, False), (other, True)):
        report = pp.verify(folder, split=split, model=model)
        assert (report.valid, report.level, f"  found: {words}" in str(report)) == (True, 2, said)


def test_documents_without_a_token_are_refused() -> None:
    x, y = rows()
    y[[3, 7]] = IGNORED
    message = refusal((x, y), declare=WORDS)
    assert message.startswith("2 of the 80 documents have no label but -100, the first of them number 3")
    assert "all 1600 labels are -100" in refusal((x, torch.full_like(y, IGNORED)), declare=WORDS)


def test_tokens_may_not_be_left_out_in_silence() -> None:
    """To count the tokens alone that a network gets right would be a lie."""
    x, y = rows()
    with torch.no_grad():
        right = made()[2].eval()(x).argmax(-1) == y
    right[:, -1] = True
    chosen = y.masked_fill(~right, IGNORED)
    assert "so that the mean is one over chosen tokens; say by declare= which tokens count" in refusal((x, chosen))
    asked = y.clone()
    asked[:, :5] = IGNORED
    assert "400 of 1600 tokens have the label -100 and a token after them" in refusal((x, asked))
    words = "only answers count, not the questions before them"
    assert words in certify("token-error", data=(x, asked), declare=words).statement


def test_labels_and_inputs_in_floating_point_do_not_hide_what_they_are() -> None:
    x, y = rows()
    assert "about documents: give token numbers (n, length)" in refusal((x, y.float()))
    assert "about documents: give token numbers (n, length)" in refusal((x.float(), y))
    assert "documents change with the tokens after them" in refusal(
        (x, y.float()), "error", model=Sighted(), declare=WORDS
    )


class TwoAhead(Sighted):
    """The same for labels that are one further ahead."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.roll(-1, 1))


def test_labels_further_ahead_may_not_be_seen_either() -> None:
    x, _ = rows()
    y = torch.cat([x[:, 2:], x[:, :1], x[:, :1]], dim=1)
    y[::5] = x[::5].flip(0)  # nor where only most labels are ahead
    assert "documents change with the tokens after them" in refusal((x, y), model=TwoAhead(), declare=WORDS)


def test_every_token_of_a_text_as_an_example_is_refused() -> None:
    x, y = text_of(1)
    assert "one token further on, as examples for every token of a text are" in refusal((x, y))
    classifier = pp.models.NextToken(copy.deepcopy(made()[2]))
    split = pp.data.split(x, y[:, -1].contiguous(), indices=HALVES, split_declared_random=True)
    for risk in ("error", "cross-entropy"):
        assert "one token further on" in refusal(split, risk, model=classifier)
    pp.attach(classifier, pp.isotropic(classifier, sparsity=0.2, std=0.01))
    prior = pp.read(classifier)
    pp.fit_posterior(classifier, prior, split, pp.Config(epochs=0))
    with pytest.raises(ValueError, match="one token further on"):
        pp.certify(classifier, prior, split, draws=50)
    single = x.reshape(-1, 1), y.reshape(-1, 1)
    assert "are copies of others, and copies are not independent" in refusal(single)


HALVES = torch.arange(40), torch.arange(40, 80)


def test_padding_that_counts_is_refused_unless_declared() -> None:
    x, y = pp.data.documents([row[: 5 + i % 17].tolist() for i, row in enumerate(rows()[0])], length=20)
    counted = y.masked_fill(y == IGNORED, 0)
    assert "documents end in token 0 at least 4 times" in refusal((x, counted))
    assert "give padding the label -100" in refusal((x, None), "token-disagreement")
    assert certify("token-error", data=(x, counted), declare=WORDS).n == 80
    assert certify("token-error", data=(x, y)).n == 80
    left = [torch.cat([torch.zeros(16 - i % 17, dtype=torch.int64), row]) for i, row in enumerate(rows()[0])]
    padded = torch.stack([row[:20] for row in left])
    assert "begin with token 0 at least 4 times" in refusal((padded[:, :-1].contiguous(), padded[:, 1:].contiguous()))


@pytest.mark.parametrize("risk", ["error", "cross-entropy", "drop", "disagreement", "top2", "brier"])
def test_risks_that_count_all_labels_refuse_those_that_do_not_count(risk: str) -> None:
    split, dense, network = made()
    reference = dense if risk in ("drop", "disagreement") else None
    with pytest.raises(ValueError, match=r"labels are -100, which does not count, but the risk .* counts all; take 't"):
        pp.certify_held_out(network, split, risk=risk, reference=reference)


def test_a_loss_of_ones_own_has_to_leave_out_what_does_not_count() -> None:
    split, _, network = made()

    def each_token(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return output.argmax(-1) != batch[1]

    def mean(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        counted = batch[1] != IGNORED
        return (each_token(output, batch) & counted).sum(1) / counted.sum(1)

    with pytest.raises(ValueError, match="have the label -100, which does not count; return the mean over"):
        pp.certify_held_out(network, split, risk=each_token)
    assert pp.certify_held_out(network, split, risk=mean).risk == pytest.approx(certify("token-error").risk, abs=1e-4)


def test_windows_of_one_text_are_refused_unless_declared() -> None:
    assert "rows go on with the token at which the row before them ends" in refusal(text_of(20))
    assert "rows begin with 32 tokens that lie inside other rows" in refusal(long_windows(40), model=long_network())
    assert certify("token-error", data=text_of(20), declare=WORDS).n == 80
    x, y = text_of(20)
    split = pp.data.split(x, y, prior_fraction=0.5)
    assert "as windows of one text do" in refusal(split, model=fitted(split))


def test_overlap_of_windows_across_the_parts_is_refused() -> None:
    x, y = long_windows(40)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))  # so that no row follows its neighbour
    split = pp.data.split(x[order], y[order])
    net = pp.models.gpt(VOCABULARY, width=8, depth=1, heads=1, context=80, dropout=0.0)
    pp.fit(net, split.prior, pp.Config(epochs=1, lr=1e-3), loss=pp.models.next_character)
    assert "tokens that lie inside other rows, as overlapping windows" in refusal(split, model=net)


def long_windows(stride: int) -> tuple[Tensor, Tensor]:
    return text_of(stride, length=80)


def long_network() -> nn.Module:
    x, y = rows()
    x, y = x.repeat(1, 4), y.repeat(1, 4)
    net = pp.models.gpt(VOCABULARY, width=8, depth=1, heads=1, context=80, dropout=0.0)
    pp.fit(net, (x[:4] + 0, y[:4]), pp.Config(epochs=1, lr=1e-3), loss=pp.models.next_character)
    return net


def fitted(split: pp.data.Split) -> nn.Module:
    net = pp.models.gpt(VOCABULARY, width=8, depth=1, heads=1, context=20, dropout=0.0)
    pp.fit(net, split.prior, pp.Config(epochs=1, lr=1e-3), loss=pp.models.next_character)
    return net


def test_documents_that_begin_alike_or_with_one_token_are_no_windows() -> None:
    x, y = rows()
    x[:, 0] = 7  # as tokenizers begin and end every document with one token
    y[:, -1] = 7
    assert certify("token-error", data=(x, y)).n == 80
    long = torch.randint(VOCABULARY, (60, 81), generator=torch.Generator().manual_seed(3))
    long[:, :40] = long[0, :40]  # a licence
    assert certify("token-error", long_network(), (long[:, :-1].contiguous(), long[:, 1:].contiguous())).n == 60


def test_copies_of_documents_need_a_declaration() -> None:
    x, y = rows()
    assert "40 of the 120 bound examples are copies of others" in refusal((x.repeat(2, 1)[:120], y.repeat(2, 1)[:120]))


def test_networks_and_references_that_saw_a_document_are_refused() -> None:
    split, dense, network = made()
    seen = copy.deepcopy(dense)
    pp.fit(seen, split.bound, pp.Config(epochs=1, lr=1e-4), loss=pp.models.next_character)
    with pytest.raises(ValueError, match="the network has seen the bound set: 60 of its 60"):
        certify("token-error", seen)
    with pytest.raises(ValueError, match="the reference has seen the bound set: 60 of its 60"):
        certify("token-drop", network, reference=seen)


def test_an_answer_that_depends_on_the_batch_is_refused() -> None:
    class Centred(nn.Module):
        def __init__(self, network: nn.Module) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor) -> Tensor:
            out = self.network(x)
            return out - out.mean(0, keepdim=True)

    message = refusal(None, model=Centred(copy.deepcopy(made()[2])), declare=WORDS)
    assert "depend on what else is in the batch" in message


@pytest.mark.parametrize("risk", ["token-error", "token-loss"])
def test_outputs_that_are_no_scores_of_tokens_are_one_sentence(risk: str) -> None:
    x, y = rows()
    words = r"a risk of tokens needs outputs \(n, length, vocabulary\) and a label for each of the n \* length tokens"
    net = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Flatten(), nn.Linear(80, 3))
    with pytest.raises(ValueError, match=words):
        pp.certify_held_out(net, (x, y), risk=risk, declare=WORDS)
    with pytest.raises(ValueError, match=words):
        pp.certify_held_out(made()[2], (x, y[:, :5].contiguous()), risk=risk, declare=WORDS)


# --- After the release, and by simulation.


def test_a_rise_of_documents_can_be_watched(tmp_path: Path) -> None:
    monitor = pp.Monitor(certify("token-loss-rise").save(tmp_path / "rise"))
    monitor.update([0.01, -0.02, 0.3], first=1)
    assert "that is a rise of" in monitor.statement
    with pytest.raises(ValueError, match=r"a rise is watched by differences in \[-1, 1\]"):
        monitor.update([1.5], first=4)
    monitor = pp.Monitor(certify("token-drop").save(tmp_path / "drop"))
    monitor.update([0.25, -0.5], first=1)
    assert "that is a drop of" in monitor.statement


def test_certificates_of_documents_hold_and_those_of_their_tokens_do_not(at_full_size: bool) -> None:
    """Documents with a rate of errors of their own, through `evaluate`: the network errs where a label is 1."""
    trials, n, length, risk = 10_000 if at_full_size else 300, 40, 20, 0.3

    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * nn.functional.one_hot(torch.zeros_like(x), 2).float()

    rng, net = np.random.default_rng(0), Zero()
    failed = [0, 0]
    for _ in range(trials):
        y = torch.from_numpy(rng.binomial(1, rng.beta(0.9, 2.1, (n, 1)), (n, length)))
        lengths = torch.from_numpy(rng.integers(5, length + 1, (n, 1)))
        y[torch.arange(length) >= lengths] = IGNORED
        part = pp.data.Part("bound", torch.zeros_like(y), y, torch.arange(n))
        tally = risks.evaluate(risks.RISKS["token-error"], net, None, part).tally()
        failed[0] += tally.p_value(risk) < 0.05
        failed[1] += bounds.clopper_pearson(int((y == 1).sum()), n=int((y != IGNORED).sum()), delta=0.05) < risk
    assert 1 - bounds.clopper_pearson(trials - failed[0], n=trials, delta=5e-4) <= 0.05
    assert failed[1] / trials > 0.15
