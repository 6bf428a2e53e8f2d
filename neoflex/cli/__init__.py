"""The `neoflex` command: what a user types. `app.py` puts it together."""

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it.


def main() -> None:
    """Entry point. Ctrl-C ends it quietly, also while it is still importing, which takes a second."""
    try:
        from neoflex.cli.app import run

        run()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
