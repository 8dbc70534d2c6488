"""What certificate.json holds: every field, its type and what it is.

A new field is one line here and one where it is filled, in certify.py; verify.py checks what can be recomputed.
"""

from typing import Literal, NotRequired, TypedDict

from pacprune.bounds.risk import LedgerEntry

FORMAT: Literal["pacprune certificate"] = "pacprune certificate"
VERSION: Literal[3] = 3
"""Version 2 had no shares and divided all of delta by `certified`; what reads a certificate reads both."""


class Reference(TypedDict):
    """The network that the draws are compared with: the thresholded prior, or the one network of a held-out record."""

    errors: int
    """Wrong answers on the bound set."""


class Draws(TypedDict):
    """The Monte-Carlo step of one distribution."""

    draws: int
    """How many networks were sampled."""
    risk: float
    """Mean error rate of the draws on their minibatches."""
    risk_upper: float
    """Upper bound on the Gibbs risk on the whole bound set, by the declared method."""
    chernoff: float
    """The same by Chernoff's bound, shown with every method."""
    seed: int
    """Follows from the hashes of P and Q and the purpose of the draws."""


class MonteCarlo(TypedDict):
    """How the Gibbs risks of Q and P were estimated."""

    method: str
    """A key of bounds_table.RISK_BOUNDS."""
    tolerance: float
    """Sampling stops when the Monte-Carlo slack is at most this."""
    batch: int
    """Bound examples per draw."""
    posterior: Draws
    """The draws of Q."""
    prior: Draws
    """The draws of P."""


class SingleDraw(TypedDict):
    """One network h ~ Q for deployment."""

    seed: int
    """h is draw number 0 of this seed."""
    errors: int
    """Wrong answers of h on the bound set."""
    log_ratio: float
    """log dQ/dP(h), rounded up."""
    sparsity: float
    """Counted share of zeros."""
    fresh: bool
    """Whether nothing was evaluated on the bound set before Q was trained; its bound is stated only then."""


class Thresholded(TypedDict):
    """The deterministic network behind Q, and how often it disagrees with draws of Q."""

    seed: int
    """Of the draws it is compared with."""
    inputs: int
    """Unlabelled inputs, one draw for each."""
    disagreements: int
    """Inputs on which its class is another than the draw's."""
    errors: int
    """Wrong answers on the bound set."""
    sparsity: float
    """Counted share of zeros."""


class BoundEntry(TypedDict):
    """One bound on the error rate on new data."""

    bound: float
    """The error rate is at most this."""
    ledger: LedgerEntry
    """How its delta is spent."""


class Claim(TypedDict):
    """The bound that was declared beforehand."""

    family: str
    """Its key in `bounds`."""
    bound: float
    """Its value."""


class Source(TypedDict):
    """Where the data came from."""

    dataset: str
    """A name of pp.data, or "own"."""
    files: dict[str, str]
    """SHA-256 of the content of each source file or tensor."""
    classes: int
    """Number of classes."""


class SplitRecord(TypedDict):
    """How the data was cut; the dictionaries have one entry for each of prior, bound and unlabelled."""

    seed: int
    """Of the permutation that cut it."""
    prior_fraction: float
    """Share of the training examples in the prior part."""
    sizes: dict[str, int]
    """Number of examples."""
    declared: bool
    """Whether the issuer brought the index lists and declared them random."""
    duplicates: int
    """Bound examples that also occur in the prior part; see data/trace.py for what is taken for equal."""
    repeats: int
    """Bound examples that are copies of others; beyond 1 % of n they need a declaration."""
    parts: dict[str, str]
    """SHA-256 of x, y and index."""
    indices: dict[str, str]
    """SHA-256 of the index list."""


class Standardisation(TypedDict):
    """Constants per channel or feature, from the prior part; empty when there was no standardisation."""

    mean: list[float]
    """What is subtracted."""
    std: list[float]
    """What is divided by."""


class Evaluation(TypedDict):
    """How every error was counted."""

    mode: str
    """Mode of the network."""
    dtype: str
    """Type of weights and inputs."""
    autocast: bool
    """Whether torch could lower the precision."""
    tf32: bool
    """Whether a GPU could lower the precision of products."""
    augmentation: bool
    """Whether inputs were changed at random."""


class Software(TypedDict):
    """What issued the certificate."""

    pacprune: str
    """Version."""
    torch: str
    """Version."""


class Group(TypedDict):
    """Certificates that get equal shares of delta."""

    certificates: int
    """How many they are."""
    share: float
    """What all of them together get of delta."""


class Shares(TypedDict):
    """How a plan that was declared beforehand divides delta among its certificates."""

    group: str
    """The group that this certificate is of."""
    groups: dict[str, Group]
    """All certificates of the plan, in groups whose shares add up to at most 1."""


class Plan(TypedDict):
    """What is fixed before Q exists."""

    delta: float
    """Probability with which the certificate may fail."""
    family: str
    """The bound to claim."""
    catoni_c: float | None
    """Catoni's constant; None for the best of the grid."""
    grid: int
    """Priors that are paid for."""
    certified: int
    """Certificates that are paid for."""
    shares: NotRequired[Shares | None]
    """How delta is divided among the certificates of a plan; None where this one has all of it. Not in version 2."""
    method: str
    """The bound on the Monte-Carlo error."""
    tolerance: float
    """Sampling stops when the Monte-Carlo slack is at most this."""
    draws: int
    """The most networks to draw of each of P and Q."""


class CommitmentRecord(TypedDict):
    """Under which seals the draws were made."""

    plan: Plan
    """What was declared."""
    source: str
    """Where the beacon comes from, and which of its values is taken."""
    digest: str
    """The first seal: of the prior, the split, the plan and the source."""
    seal: str
    """The second seal: of the first and of Q."""
    beacon: str
    """Randomness that is younger than the second seal, in hexadecimal."""


class Header(TypedDict):
    """The fields that stand at the head of all kinds."""

    format: str
    """Always FORMAT."""
    version: int
    """Always VERSION."""
    model: str | None
    """Which network it is, for those who recount: one of pacprune's models, or package.module:factory; or None."""
    n: int
    """Number of bound examples."""
    sparsity: float
    """Expected sparsity of Q, or counted sparsity of a deterministic network."""
    total: int
    """Number of prunable weights."""
    examples_seen: int
    """How many example hashes the prior, or the network, has noted as seen."""


class Subject(Header):
    """What the two older kinds have in common."""

    reference: Reference
    """The reference network."""


class Conclusion(TypedDict):
    """What follows."""

    bounds: dict[str, BoundEntry]
    """Every bound by its key in bounds_table.BOUNDS; each is valid by itself, not all at once."""
    claim: Claim
    """The declared one."""
    statement: str
    """What is proved, in one sentence, and what the issuer states beside it."""
    declaration: str | None
    """What the issuer states of what pacprune could not trace; the sentence quotes it."""
    commitment: CommitmentRecord | None
    """Under which seals the draws were made; None where nothing was sealed, and for a deterministic network."""


class Provenance(TypedDict):
    """What it rests on."""

    data: Source
    """Where the data came from."""
    split: SplitRecord
    """How it was cut."""
    standardisation: Standardisation
    """How it was standardised."""
    evaluation: Evaluation
    """How errors were counted."""
    hashes: dict[str, str]
    """SHA-256 of prior, posterior and rest, or of the model."""
    assumptions: list[str]
    """What no computation can show, in the words of verify.py's `assumptions`."""
    software: Software
    """What issued it."""
    files: NotRequired[dict[str, str]]
    """SHA-256 of the files beside certificate.json; added by `Certificate.save`."""
    digest: NotRequired[str]
    """SHA-256 of the record without this field; added by `Certificate.save`."""


class Evidence(Subject):
    """What the bounds of a random network follow from."""

    kind: Literal["pac-bayes"]
    """Tells the kinds of record apart."""
    kl: float
    """KL(Q||P) in nats, rounded up."""
    kl_per_tensor: dict[str, float]
    """Its terms, each rounded up."""
    monte_carlo: MonteCarlo
    """The estimated risks of Q and P."""
    catoni_c: float | None
    """Catoni's constant if it was fixed beforehand; None for the best of the grid."""
    single_draw: SingleDraw
    """One drawn network."""
    thresholded: Thresholded
    """The deterministic network behind Q."""
    shares: NotRequired[Shares | None]
    """How delta is divided among the certificates of a plan; None where this one has all of it. Not in version 2."""


class PacBayesRecord(Evidence, Conclusion, Provenance):
    """The record of a random network Q, certified against a prior P."""


class HeldOutRecord(Subject, Conclusion, Provenance):
    """The record of a deterministic network that never saw the bound set."""

    kind: Literal["held-out"]
    """Tells the kinds of record apart."""


class RiskEntry(TypedDict):
    """Which risk it is."""

    name: str
    """A key of risks.RISKS, or module:function of the issuer's own loss."""
    whole: bool
    """Whether values are whole numbers, which are counted; others are levels, in examples.safetensors."""


class DifferenceCounts(TypedDict):
    """What was counted of whole numbers."""

    plus: int
    """How often the value was 1."""
    minus: int
    """How often it was -1; 0 for a risk that is no difference."""


class RiskTest(TypedDict):
    """What was found of one network on one group of examples."""

    network: str
    """SHA-256 of the network."""
    sparsity: float
    """Its counted share of zeros."""
    group: str | None
    """The group; None for all bound examples."""
    n: int
    """How many examples are in it."""
    counts: DifferenceCounts | None
    """What was counted; None for levels."""
    mean: float
    """The empirical risk."""
    bound: float | None
    """The upper bound; None for a network that passed in a sequence, of which the limit alone is proved."""
    p_value: float | None
    """Of "the risk is above the limit"; None without a limit."""
    passed: bool | None
    """Whether the p-value is at most delta; None without a limit."""


class RiskRecord(Header, Conclusion, Provenance):
    """The record of deterministic networks, by any risk: one, in groups, several at once, or tested in a sequence."""

    kind: Literal["risk"]
    """Tells the kinds of record apart."""
    risk: RiskEntry
    """Which risk."""
    rule: str
    """"all" for bounds that hold at once, each at its part of delta; "sequence" for tests at the full delta."""
    limit: float | None
    """What is tested in a sequence; None for bounds."""
    order: list[str]
    """SHA-256 of all candidates in the declared order."""
    tests: list[RiskTest]
    """What was found, network by network and group by group, up to the first test that failed."""


Record = PacBayesRecord | HeldOutRecord | RiskRecord
