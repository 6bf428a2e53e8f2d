"""`python -m planner_svc.advisor`: what `neoflex plan` runs. Answers go to standard output, complaints to error."""

import json
import sys

from rich.console import Console

from planner_svc.advisor import report
from planner_svc.advisor.arguments import DTYPE_BYTES, Options, parse
from planner_svc.advisor.errors import InputError
from planner_svc.advisor.machines import read_machine, with_memory
from planner_svc.advisor.models import find_spec
from planner_svc.policy import NoPolicyError, PolicyEstimator, PolicySearch, decoder_figures
from svc_common.wording import counted

_PIPED_WIDTH = 200
"""Of a table that no terminal bounds."""


def main() -> None:
    """Exit code 2 for what the caller can mend, 1 where nothing fits the machine."""
    options = parse()
    try:
        _answer(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except NoPolicyError as error:
        print(f"error: no policy fits: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _answer(options: Options) -> None:
    spec = find_spec(options.model)
    mix = options.mix(spec)
    machine = with_memory(read_machine(options.hardware), options.gpu_memory, options.host_memory)
    dtype_bytes = DTYPE_BYTES[options.dtype]
    estimator = PolicyEstimator(decoder_figures(spec, dtype_bytes, dtype_bytes), machine)
    comparison = PolicySearch(estimator).compare(mix)
    title = (
        f"{options.model} in {options.dtype} on {machine.name}: {counted(mix.num_sequences, 'request')}, "
        f"{counted(mix.prompt_tokens, 'token')} in, {mix.output_tokens:,} out"
    )
    if options.json:
        print(json.dumps(report.to_json(title, estimator, comparison)))
    else:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(width=_PIPED_WIDTH, highlight=False)
        console.print(report.tables(title, estimator, comparison))
    if options.pictures:
        from planner_svc.advisor import picture  # matplotlib takes a second to import.

        picture.draw(title, estimator, comparison.best, options.pictures)


if __name__ == "__main__":
    main()
