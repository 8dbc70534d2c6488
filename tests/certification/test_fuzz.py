"""Changed, odd and hostile folders: every verifier says the same of each, without harm; and what is hard to read."""

import json
import math
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mpmath
import mutations
import pytest
from mutations import PACKED, RECORD, Case, Files, arithmetic, record_of, stored

VERIFIER = Path(arithmetic.__file__)

# Verifies the folders that it reads from its input, by verify.py alone or by the library.
CHILD = """
import importlib.util, json, re, resource, sys, time, traceback
from pathlib import Path

if sys.argv[1] == "pacprune":
    import pacprune
    verify = pacprune.verify
else:
    spec = importlib.util.spec_from_file_location("alone", sys.argv[1])
    alone = sys.modules["alone"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    verify = alone.verify
    assert "pacprune" not in sys.modules and "torch" not in sys.modules
for folder in sys.stdin.read().splitlines():
    start = time.process_time()
    try:
        report = verify(folder)
        answer = ["valid" if report.valid else "refused", report.failure]
    except ValueError as error:
        answer = ["unreadable", str(error)]
    except BaseException:
        answer = ["traceback", traceback.format_exc()]
    print(json.dumps([*answer, time.process_time() - start]))
status = Path("/proc/self/status")  # getrusage counts the memory of the parent in it, which was there before
peak = re.search(r"VmHWM:\\s*(\\d+)", status.read_text()) if status.exists() else None
print(int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""

# What nothing that can be computed from the folder depends on.
ON_TRUST = (
    r"digest|files/.*|hashes/.*|.*/?seed|model|examples_seen|software/.*|data/.*|standardisation/.*|claim/family"
    r"|split/(prior_fraction|duplicates|repeats|sizes/prior|parts/.*|indices/.*)|monte_carlo/tolerance"
    r"|single_draw/errors|thresholded/(errors|disagreements)|commitment/.*|order/.*|tests/[0-9]+/(network|sparsity)"
)


@pytest.fixture(scope="module")
def bases() -> dict[str, Files]:
    return mutations.certificates()


@pytest.fixture(scope="module")
def cases(bases: dict[str, Files], at_full_size: bool) -> list[Case]:
    return list(mutations.cases(bases, 2000 if at_full_size else 200))


@pytest.fixture(scope="module")
def folders(cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("cases")
    return [mutations.write(case.files, root / str(i)) for i, case in enumerate(cases)]


@pytest.fixture(scope="module")
def answers(folders: list[Path]) -> dict[str, Any]:
    """What verify.py alone and the library say: [answer, reason, seconds] of each folder; at the end, kilobytes."""

    def ask(name: str) -> list[Any]:
        listed, command = "\n".join(map(str, folders)), [sys.executable, "-c", CHILD, name]
        process = subprocess.run(command, input=listed, stdout=subprocess.PIPE, text=True, check=True)
        return [json.loads(line) for line in process.stdout.splitlines()]

    with ThreadPoolExecutor() as pool:
        return dict(zip(("verify.py", "pacprune"), pool.map(ask, (str(VERIFIER), "pacprune")), strict=True))


def answer(files: Files, folder: Path) -> str:
    """What verify.py says: valid, refused with the rule, or unreadable with the reason."""
    try:
        report = arithmetic.verify(mutations.write(files, folder))
    except ValueError as error:
        return f"unreadable: {error}"
    return "valid" if report.valid else f"refused: {report.failure}"


# --- All of them.


def test_true_certificates_of_all_sorts_are_valid(bases: dict[str, Files], tmp_path: Path) -> None:
    assert {sort: answer(files, tmp_path / sort) for sort, files in bases.items()} == dict.fromkeys(bases, "valid")


def test_verify_and_the_library_say_the_same_and_never_fail(cases: list[Case], answers: dict[str, Any]) -> None:
    pairs = list(zip(cases, *(lines[:-1] for lines in answers.values()), strict=True))
    assert [(case.name, alone) for case, alone, _ in pairs if alone[0] == "traceback"] == []
    assert [(case.name, alone, library) for case, alone, library in pairs if alone[0] != library[0]] == []
    counts = {kind: sum(alone[0] == kind for _, alone, _ in pairs) for kind in ("valid", "refused", "unreadable")}
    assert min(counts.values()) > len(cases) // 10, counts  # all three are put to the test


def test_none_takes_a_gigabyte_or_ten_seconds(cases: list[Case], answers: dict[str, Any]) -> None:
    for lines in answers.values():
        slowest = max(zip(lines[:-1], cases, strict=True), key=lambda pair: pair[0][2])
        assert slowest[0][2] < 10, slowest[1].name
        assert lines[-1] < 2**20  # kilobytes


def test_what_stays_valid_says_what_it_said(
    bases: dict[str, Files], cases: list[Case], answers: dict[str, Any]
) -> None:
    """Only what is on trust, or what is left of rounding, may differ from the true certificate."""

    def flat(record: Any) -> dict[str, Any]:
        record["statement"] = re.sub(r"the commitment \w+", "the commitment", record["statement"])
        values = {path: mutations.value_at(record, path) for path in mutations.paths(record)}
        return {"/".join(map(str, p)): v for p, v in values.items() if not isinstance(v, (dict, list))}

    def differ(first: Any, second: Any) -> bool:
        if type(first) in (int, float) and type(second) in (int, float):
            return not math.isclose(first, second, rel_tol=1.1e-7, abs_tol=2e-12)
        return first != second

    passed = []
    for case, (kind, *_) in zip(cases, answers["verify.py"][:-1], strict=True):
        if kind != "valid" or case.name == "invent_the_counts":  # those are new certificates
            continue
        old, new = flat(record_of(bases[case.base])), flat(record_of(case.files))
        fewer = {path for path in old if path not in new and path.startswith("bounds/")}
        changed = [
            path for path in old.keys() | new.keys() if differ(old.get(path), new.get(path)) and path not in fewer
        ]
        passed += [(case.name, case.base, path) for path in changed if not re.fullmatch(ON_TRUST, path)]
    assert passed == []


def test_invented_counts_that_are_consistent_are_valid(cases: list[Case], answers: dict[str, Any]) -> None:
    """Level 1 cannot do better, and says so; the library's bounds and those of verify.py agree on all of them."""
    kinds = {i: line for i, line in enumerate(answers["verify.py"][:-1]) if cases[i].name == "invent_the_counts"}
    assert kinds
    assert {i: line for i, line in kinds.items() if line[0] != "valid"} == {}


def test_the_script_by_itself_exits_with_its_answer(
    folders: list[Path], answers: dict[str, Any], at_full_size: bool
) -> None:
    step = 40 if at_full_size else 17
    for folder, (kind, reason, _) in list(zip(folders, answers["verify.py"][:-1], strict=True))[::step]:
        process = subprocess.run([sys.executable, VERIFIER, folder], capture_output=True, timeout=60)
        assert process.returncode == {"valid": 0, "refused": 1, "unreadable": 2}[kind], reason
        output = (process.stdout + process.stderr).decode()
        assert all(character.isprintable() or character == "\n" for character in output)
        assert "Traceback" not in output


def test_a_changed_case_is_a_function_of_the_seed_and_its_number(bases: dict[str, Files], cases: list[Case]) -> None:
    again = list(mutations.cases(bases, 60))
    assert [case.files for case in again] == [case.files for case in cases[:60]]
    assert [case.files for case in mutations.cases(bases, 60, seed=1)] != [case.files for case in again]


# --- What is hard to read, one by one.


def with_header(files: Files, change: Callable[[dict[str, Any]], Any], name: str = "model.safetensors") -> Files:
    """The folder with another header of a file, and hashes that fit."""
    content = files[name]
    assert isinstance(content, bytes)
    header, data = mutations.header_of(*mutations.parsed(content))
    files = files | {name: mutations.packed_up(change(header), data)}
    return stored(files, record_of(files))


def first_offsets(*values: Any) -> Callable[[dict[str, Any]], Any]:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        entry = next(entry for entry in header.values() if entry["data_offsets"][0] == 0)
        entry["data_offsets"] = [*values, entry["data_offsets"][1]][:2]
        return header

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda header: json.dumps(header).encode("utf-16"), "'utf-8' codec can't decode"),
        (lambda header: json.dumps(header).encode("utf-32-le"), "cannot be read as safetensors"),
        (lambda header: b"\xef\xbb\xbf" + json.dumps(header).encode(), "BOM"),
        (lambda header: {"__metadata__": [[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]} | header, "inside one another"),
        (
            lambda header: header | {"x": {"dtype": "F32", "shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}},
            "no shape",
        ),
        (lambda header: json.dumps(header).encode() + b" " * 2**23, "its header would end"),
        (first_offsets(False), "does not fill"),
        (first_offsets(0.0), "does not fill"),
    ],
)
def test_a_header_that_readers_could_take_in_two_ways_is_not_read(
    bases: dict[str, Files], tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    said = answer(with_header(bases["held-out"], change), tmp_path / "folder")
    assert said.startswith("unreadable: ")
    assert words in said


@pytest.mark.parametrize(
    ("depth", "kind"), [(14, "refused"), (15, "refused"), (16, "unreadable"), (10**5, "unreadable")]
)
def test_how_deep_json_may_be_is_the_same_for_every_python(
    bases: dict[str, Files], tmp_path: Path, depth: int, kind: str
) -> None:
    text = mutations.layout(record_of(bases["held-out"]) | {"model": "@"}).replace(b'"@"', b"[" * depth + b"]" * depth)
    assert answer(bases["held-out"] | {RECORD: text}, tmp_path / "folder").split(":")[0] == kind


def test_a_record_without_the_ledger_of_all_others_is_refused(bases: dict[str, Files], tmp_path: Path) -> None:
    record = record_of(bases["usual"])
    del record["bounds"]["held_out"]
    assert answer(stored(bases["usual"], record), tmp_path / "folder") == (
        "refused: bounds are given without held_out, whose ledger the others follow"
    )


def test_a_delta_too_small_for_a_logarithm_is_refused(bases: dict[str, Files], tmp_path: Path) -> None:
    record = record_of(bases["usual"])
    for entry in record["bounds"].values():
        entry["ledger"]["delta"] = 5e-324
    assert "impossible delta 5e-324" in answer(stored(bases["usual"], record), tmp_path / "folder")


@pytest.mark.parametrize("shape", [[], [0, 4], [40]])
def test_weights_of_no_size_or_of_one_dimension_are_refused(
    bases: dict[str, Files], tmp_path: Path, shape: list[int]
) -> None:
    files, name = (
        dict(bases["masks alone, packed"]),
        next(iter(record_of(bases["masks alone, packed"])["kl_per_tensor"])),
    )
    content = files[PACKED]
    assert isinstance(content, bytes)
    blobs, metadata = mutations.parsed(content)
    index = json.loads(metadata["index"])
    size = math.prod(shape)
    blobs |= {
        "half": ("F32", [size], struct.pack("<f", 0.5) * size),
        "bits": ("U8", [(size + 7) // 8], b"\0" * ((size + 7) // 8)),
    }
    for table in index.values():
        for key, (dtype, *_) in table.items():
            if key.endswith(name) and not key.startswith("single_draw/") and "std" not in key:
                table[key] = [dtype, shape, "half"]
        if f"single_draw/{name}" in table:
            table[f"single_draw/{name}"] = ["uint8", [(size + 7) // 8], "bits"]
    used = {key for table in index.values() for entry in table.values() for key in entry[2:]}
    blobs = {key: blob for key, blob in blobs.items() if key in used}
    files[PACKED] = mutations.packed_up(*mutations.header_of(blobs, metadata | {"index": json.dumps(index)}))
    said = answer(mutations.rehashed(stored(files, record_of(files))), tmp_path / "folder")
    assert f"{name} has the shape" in said


@pytest.mark.parametrize(
    ("errors", "n", "delta"),
    [
        (48, 10**9, 0.05),
        (10**6, 10**9, 0.01),
        (100, 10**7, 0.01),
        (48, 5_013_903, 0.9999),
        (0, 10**9, 0.05),
        (3, 7, 0.3),
    ],
)
def test_the_held_out_bound_of_verify_is_exact_up_to_a_billion_examples(errors: int, n: int, delta: float) -> None:
    """The tail at the bound is delta: sums of numbers of size n log n lost six digits of it."""
    bound = arithmetic.clopper_pearson(errors, n, delta)
    with mpmath.workdps(40):
        p, tail = mpmath.mpf(bound), mpmath.mpf(0)
        term = mpmath.exp(
            mpmath.log(mpmath.binomial(n, errors)) + errors * mpmath.log(p) + (n - errors) * mpmath.log1p(-p)
        )
        for j in range(errors, -1, -1):
            tail += term
            term *= mpmath.mpf(j) / (n - j + 1) * (1 - p) / p
            if term < tail * mpmath.mpf(10) ** -20:
                break
        assert abs(float(tail) - delta) < 1e-7 * delta


def test_a_billion_examples_take_seconds(bases: dict[str, Files], tmp_path: Path) -> None:
    record = record_of(bases["held-out"])
    n = record["n"] = record["split"]["sizes"]["bound"] = 10**9
    record["reference"]["errors"] = n // 2
    start = time.process_time()
    assert "bounds.held_out.bound" in answer(stored(bases["held-out"], record), tmp_path / "folder")
    assert time.process_time() - start < 10
