"""The `neoflex` command: what a user types. `app.py` puts it together."""

import os
import sys

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it.


def main() -> None:
    """Entry point. Ctrl-C ends it quietly, also while it is still importing, which takes a second."""
    # Of a connection that fails the command says what there is to say, without lines of gRPC's core, which reads this
    # as it is imported. The services of `up` inherit it, and are to keep theirs.
    if sys.argv[1:2] != ["up"]:
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        from neoflex.cli.app import run

        run()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
