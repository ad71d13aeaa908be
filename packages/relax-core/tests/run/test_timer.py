import pytest
from relax_core.run import PhaseTimer


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_time_is_booked_on_its_phase_and_once_only(clock):
    timer = PhaseTimer(clock)
    clock.now += 1
    with timer.phase("rollout"):
        clock.now += 2
        with timer.phase("reward"):
            assert timer.current == "reward"
            clock.now += 4
        clock.now += 8
    with timer.phase("train"):
        clock.now += 16
    with timer.phase("rollout"):
        clock.now += 32
    assert timer.take() == {"rollout": 42, "reward": 4, "train": 16, "total": 63}
    assert timer.current is None


def test_take_starts_the_next_step(clock):
    timer = PhaseTimer(clock)
    with timer.phase("train"):
        clock.now += 1
        assert timer.take() == {"train": 1, "total": 1}
        clock.now += 2
    clock.now += 4
    assert timer.take() == {"train": 2, "total": 6}
    assert timer.take() == {"total": 0}


def test_a_phase_that_fails_is_booked_too(clock):
    timer = PhaseTimer(clock)

    def fail():
        clock.now += 3
        raise RuntimeError

    with pytest.raises(RuntimeError), timer.phase("train"):
        fail()
    assert timer.take() == {"train": 3, "total": 3}
