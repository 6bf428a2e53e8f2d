"""What is said of an address that more than this machine reaches."""

import pytest

from svc_common.security.exposure import exposure, is_local


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.8.9.10:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:/s", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("planner:1", False),
    ],
)
def test_which_addresses_are_local(address: str, local: bool) -> None:
    assert is_local(address) is local
    assert bool(exposure(address, False, False)) is not local


def test_what_is_missing_is_said() -> None:
    may_call, unencrypted = "whoever reaches it may call", "what it says and is told crosses the network unencrypted"
    assert exposure("planner:1", True, True) == ""
    assert exposure("planner:1", True, False) == f"planner:1 is open: {may_call}"
    assert exposure("planner:1", False, True) == f"planner:1 is open: {unencrypted}"
    assert exposure("planner:1", False, False) == f"planner:1 is open: {may_call}, and {unencrypted}"
