"""Runs a LocalStack of stand-ins as `neoflex up` does: `supervise.py RUN_DIR DIARY LISTEN`."""

import sys
from pathlib import Path

from neoflex.cli.supervise import supervise
from neoflex.cli.voice import PlainVoice
from support.stacks import stand_in_stack

supervise(stand_in_stack(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]), quiet=False, voice=PlainVoice())
