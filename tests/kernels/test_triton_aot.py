"""What the kernels of the GPU compile to on every architecture; and whether the check of that would notice a fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd_kernels.triton import aot, sass
from kvd_kernels.triton.aot import Outcome, Report
from kvd_kernels.triton.cards import ARCHITECTURES, SHARED_BYTES
from kvd_kernels.triton.variants import Budget

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "aot"
PLANTED = "tests.kernels.planted_variants"


@pytest.fixture(scope="module")
def from_the_root() -> Iterator[None]:
    """The compiling processes import the planted kernels by the folder that they start in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope="module")
def sampled(from_the_root: None) -> list[Outcome]:
    return aot.run(CACHE, is_sample=True)


@pytest.fixture(scope="module")
def everything(from_the_root: None) -> list[Outcome]:
    return aot.run(CACHE)


def check(outcomes: list[Outcome], module: str) -> None:
    mine = [outcome for outcome in outcomes if outcome.module == module]
    assert mine, "no form was compiled"
    broken = [outcome for outcome in mine if outcome.violations]
    assert not broken, "\n" + aot.table(broken)


@pytest.mark.parametrize("module", aot.MODULES)
def test_triton_kernels_compile_within_their_budgets(sampled: list[Outcome], module: str) -> None:
    check(sampled, module)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("module", aot.MODULES)
def test_triton_forms_compile_within_their_budgets(everything: list[Outcome], module: str, architecture: int) -> None:
    check([outcome for outcome in everything if outcome.architecture == architecture], module)


# --------------------------------------------------------------------------- planted faults


@pytest.fixture(scope="module")
def planted(from_the_root: None) -> dict[str, Outcome]:
    """Two architectures whose products of matrices are different instructions."""
    return {f"{outcome.name}-{outcome.architecture}": outcome for outcome in aot.run(CACHE, [PLANTED], [80, 90])}


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("sound", None),
        ("shared", "bytes of shared memory"),
        ("spills", "spills or local memory: frame of "),
        ("spills in a counted loop", "spills or local memory: frame of "),
        ("scalar", "0 16-byte loads, expected 2"),
        ("costly", "budget 0.10"),
        ("straight", "no loop"),
        ("refused", "does not compile"),
        ("arguments", "differ in other"),
    ],
)
def test_triton_planted_fault_is_found(
    planted: dict[str, Outcome], name: str, complaint: str | None, architecture: int
) -> None:
    outcome = planted[f"{name}-{architecture}"]
    if complaint is None:
        assert outcome.violations == ()
        assert outcome.report.loop_matrix_products > 0
    else:
        (violation,) = outcome.violations
        assert complaint in violation


def test_triton_spill_is_seen_in_the_instructions_too(planted: dict[str, Outcome]) -> None:
    assert planted["spills in a counted loop-80"].report.local_accesses > 0


def test_triton_sample_has_every_kernel_once(planted: dict[str, Outcome]) -> None:
    chosen = aot.run(CACHE, [PLANTED], [80, 90], is_sample=True)
    assert sorted(outcome.kernel for outcome in chosen) == sorted({outcome.kernel for outcome in planted.values()})
    assert {outcome.architecture for outcome in chosen} == {80, 90}


def test_triton_report_is_kept_until_it_is_damaged(from_the_root: None, tmp_path: Path) -> None:
    def report() -> Report:
        (outcome,) = aot.run(tmp_path, [PLANTED], [86], jobs=1)
        return outcome.report

    first = report()
    (kept,) = tmp_path.iterdir()
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"registers": 1}))
    assert report().registers == 1
    kept.write_text(kept.read_text()[:-5])
    assert report() == first


def test_triton_dead_worker_is_no_clean_result(from_the_root: None, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no_such_module"):
        aot.run(tmp_path, ["tests.kernels.no_such_module"], [80])


def test_triton_limit_itself_is_within() -> None:
    budget = Budget(elements_per_iteration=320, instructions_per_element=1.0, min_wide_loads=4)
    report = Report(shared_bytes=SHARED_BYTES[86], wide_loads=4, loop_instructions=5)
    assert aot.violations(report, budget, 2, 86) == ()
    over = Report(shared_bytes=SHARED_BYTES[86] + 1, wide_loads=3, loop_instructions=6)
    assert len(aot.violations(over, budget, 2, 86)) == 3


# --------------------------------------------------------------------------- reading machine code

LISTING = """
	.section	.text.kernel,"ax",@progbits
kernel:
.text.kernel:
        /*0000*/                   S2R R18, SR_TID.X ;
.L_x_1:
        /*0010*/                   LDS.128 R4, [R2] ;
.L_x_2:
        /*0020*/              @!P0 LDGSTS.E.BYPASS.128 [R0], desc[UR18][R4.64], P0 ;
        /*0030*/                   HMMA.16816.F32 R40, R24, R12, RZ ;
        /*0040*/              @!P1 BRA `(.L_x_4) ;
        /*0050*/                   LDG.E.U16.CONSTANT R3, [R4.64] ;
.L_x_4:
        /*0060*/              @UP0 BRA.U `(.L_x_2) ;
        /*0070*/                   FADD R1, R1, R2 ;
        /*0080*/                   FADD R1, R1, R2 ;
        /*0090*/               @P0 BRA `(.L_x_1) ;
.L_x_5:
        /*00a0*/                   STL [R1+0x8], R5 ;
        /*00b0*/                   FADD R1, R1, R2 ;
        /*00c0*/                   FADD R1, R1, R2 ;
        /*00d0*/                   FADD R1, R1, R2 ;
        /*00e0*/                   FADD R1, R1, R2 ;
        /*00f0*/                   FADD R1, R1, R2 ;
        /*0100*/               @P0 BRA `(.L_x_5) ;
        /*0110*/                   EXIT ;
.L_x_3:
        /*0120*/                   BRA `(.L_x_3);
"""


def test_triton_main_loop_is_the_innermost_that_works() -> None:
    code = sass.parse_listing(LISTING)
    assert len(code.instructions) == 19
    assert code.loops() == [(2, 6), (1, 9), (10, 16)]
    assert [instruction.name for instruction in code.main_loop()] == ["LDGSTS", "HMMA", "BRA", "LDG", "BRA"]
    assert (code.wide_loads, code.local_accesses, sass.count_matrix(code.main_loop())) == (1, 1, 1)
    assert [instruction.loaded_bytes for instruction in code.main_loop()] == [16, 0, 0, 2, 0]


def test_triton_main_loop_without_work_is_the_longest() -> None:
    code = sass.parse_listing(LISTING.replace("HMMA.16816.F32", "FFMA").replace("BYPASS.128", "64"))
    assert len(code.main_loop()) == 7


@pytest.mark.parametrize(
    ("opcode", "is_wide"),
    [("LDG.E.128", True), ("LDG.E.NA.128.CONSTANT", True), ("LDG.E.ENL2.256", True), ("UBLKCP.S.G", True),
     ("LDG.E.64", False), ("LDG.E", False), ("LDS.128", False), ("STG.E.128", False), ("LDL.128", False)],
)  # fmt: skip
def test_triton_wide_loads(opcode: str, is_wide: bool) -> None:
    assert sass.Instruction(opcode).is_wide_load == is_wide


def test_triton_listing_without_code_is_an_error() -> None:
    with pytest.raises(ValueError, match="no instruction"):
        sass.parse_listing(LISTING.replace("/*", "(*"))
    with pytest.raises(ValueError, match="no LOCAL"):
        sass.parse_resources(" Function k:\n  REG:79 STACK:0 SHARED:0 CONSTANT[0]:408\n")


def test_triton_resources_are_the_largest_of_all_functions() -> None:
    listing = "Function a:\n REG:79 STACK:0 SHARED:0 LOCAL:8\nFunction b:\n REG:40 STACK:16 SHARED:4 LOCAL:0\n"
    assert sass.parse_resources(listing) == sass.Resources(79, 16, 8, 4)
