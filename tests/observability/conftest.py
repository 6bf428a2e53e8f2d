"""A stack under load and a Prometheus that scrapes it. `make observability` says where it is to come from."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--load-s", type=float, default=12.0, help="seconds of load (12); longer for pictures to show")


@pytest.fixture(scope="session")
def load_s(pytestconfig: pytest.Config) -> float:
    seconds: float = pytestconfig.getoption("--load-s")
    return seconds
