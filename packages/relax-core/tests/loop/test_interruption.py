import os
import signal
import threading
from contextlib import suppress

import pytest
from relax_core.loop.interruption import Interruption

SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)


@SIGNALS
def test_while_a_run_starts_a_signal_ends_it_at_once(number):
    with Interruption(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


@SIGNALS
def test_later_the_first_signal_waits_and_the_second_does_not(number, caplog):
    with Interruption() as interruption:
        interruption.defer()
        os.kill(os.getpid(), number)
        assert interruption.requested
        assert f"{number.name}: the run ends once this step is done" in caplog.text
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_a_signal_that_an_import_swallowed_is_not_lost():
    with Interruption() as interruption:
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interruption.defer()


def test_the_handlers_from_before_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interruption():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_on_another_thread_nothing_is_caught():
    def enter():
        with Interruption() as interruption:
            interruption.defer()
            seen.append(interruption.requested)

    seen = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [False]
