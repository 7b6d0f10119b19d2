"""A million random deviations under a shadow of the arena, also under the sanitizers; and proof
that the shadow sees what it is there to see."""

import subprocess

import pytest

CLEAN = {
    "overlaps": 0,
    "handed out under a side stream": 0,
    "damaged blocks": 0,
    "iterations not recovered": 0,
    "bad children": 0,
}
KINDS = (
    *("extra", "missing", "resized", "reordered", "other stream", "other thread", "side stream"),
    *("late free", "held", "repeated phase", "off and on", "evaluation", "broken off", "fork"),
)


def run(program, *arguments):
    """Exit status and the counts that the program printed."""
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, timeout=280
    )
    lines = [line.rpartition(": ") for line in done.stdout.splitlines()]
    counts = {name: int(value) for name, _, value in lines}
    return done.returncode, counts, done.stderr


def sanitized(compile_program, name, flags):
    try:
        return compile_program(f"fuzz-{name}", "fuzz/main.cpp", *flags)
    except RuntimeError as error:
        if name in str(error) or "sanitize" in str(error):
            pytest.skip(f"the compiler has no {name}: {error}")
        raise


def test_a_million_deviations_never_share_bytes_and_never_last(compile_program):
    program = compile_program("fuzz", "fuzz/main.cpp")
    status, counts, _ = run(program, "alone", 1_000_000, 1)
    assert {name: counts[name] for name in CLEAN} == CLEAN
    assert status == 0
    assert counts["deviations"] >= 1_000_000
    assert all(counts[kind] > 100 for kind in KINDS)
    # The policy is worth its lines: with six deviations in some thirty requests most still hit.
    assert counts["hits in them"] > 0.7 * counts["requests in them"]


def test_several_threads_and_forks_never_share_bytes(compile_program):
    status, counts, _ = run(compile_program("fuzz", "fuzz/main.cpp"), "threads", 2_000_000, 2)
    assert (status, counts["overlaps"], counts["damaged blocks"]) == (0, 0, 0)
    assert counts["children"] >= 60 and counts["bad children"] == 0


@pytest.mark.parametrize("mode", ["alone", "threads"])
def test_without_the_occupancy_check_the_shadow_sees_overlaps(compile_program, mode):
    program = compile_program("fuzz-mutant", "fuzz/main.cpp", "-DMEMO_WITHOUT_OCCUPANCY_CHECK")
    status, counts, _ = run(program, mode, 5_000, 3)
    assert status == 1
    assert counts["overlaps"] > 0 and counts["damaged blocks"] > 0


@pytest.mark.parametrize(
    ("mode", "amount"), [("alone", 30_000), ("threads", 50_000)], ids=("alone", "threads")
)
def test_the_core_is_clean_under_address_and_undefined_behaviour_sanitizers(
    compile_program, mode, amount
):
    flags = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    status, counts, errors = run(sanitized(compile_program, "asan", flags), mode, amount, 4)
    assert status == 0, errors[-3000:]
    assert counts["overlaps"] == 0


def test_the_core_is_clean_under_the_thread_sanitizer(compile_program):
    program = sanitized(compile_program, "tsan", ("-O1", "-fsanitize=thread"))
    status, counts, errors = run(program, "threads", 50_000, 5)
    assert status == 0, errors[-3000:]
    assert counts["overlaps"] == 0
