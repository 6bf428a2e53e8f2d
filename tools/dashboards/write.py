"""Writes the dashboards as JSON: `python tools/dashboards/write.py [DIRECTORY]`, by default where Grafana finds it."""

import sys
from pathlib import Path

import capacity
import machine
import users
from panels import to_json

DIRECTORY = Path(__file__).parents[2] / "compose" / "observability" / "grafana" / "dashboards"


def main() -> None:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY
    for page in (users.PAGE, machine.PAGE, capacity.PAGE):
        (directory / f"{page.uid}.json").write_text(to_json(page))


if __name__ == "__main__":
    main()
