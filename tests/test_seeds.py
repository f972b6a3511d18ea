"""Seeds: the values that records were made with, and draws that stay apart."""

from gcpo import seeds


def test_derived_seeds_keep_their_values() -> None:
    # printf '3:10' | sha256sum
    digest = "87e220e6c9393cf1d63add95f816f743a72c8d7e203401f47a0b96335d55dc5d"
    assert seeds.of_step(3, 10) == 13
    assert seeds.of_chunk(3, 10) == int(digest[:8], 16)
    assert seeds.place(3, "10").hex() == digest


def test_chunks_and_runs_draw_apart() -> None:
    assert len({seeds.of_chunk(seed, first) for seed in range(20) for first in range(0, 300, 10)}) == 20 * 30


def test_a_world_draws_its_own_questions_and_world_0_those_of_the_seed() -> None:
    assert [seeds.of_world(seed, 0) for seed in range(3)] == [0, 1, 2]
    drawn = {seeds.of_world(seed, world) for seed in range(50) for world in (1, 2)}
    assert len(drawn) == 100 and not drawn & {*range(50)}
