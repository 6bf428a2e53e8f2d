"""What is long says how far it is, what is short says nothing."""

import logging

import pytest

from svc_common.progress import EVERY_S, Progress


def test_a_share_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now_s = 100.0
    progress = Progress(logging.getLogger("test"), "loading layers", 80, clock=lambda: now_s)
    progress.reached(10)
    now_s += 0.9 * EVERY_S
    progress.reached(20)
    now_s += 0.2 * EVERY_S
    progress.reached(40)
    progress.reached(50)
    now_s += 3 * EVERY_S
    progress.reached(79)
    progress.reached(80)
    assert caplog.messages == ["loading layers: 50 %", "loading layers: 99 %"]
