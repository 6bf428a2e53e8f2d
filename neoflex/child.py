"""The first moment of a supervised child: ties its life to its parent's, then becomes the service itself.

Run as a plain file (`python -I -S child.py PARENT_PID PROGRAM ARGUMENT...`): it may import nothing but the standard
library. Doing this here, and not between fork and exec in the parent, keeps the parent free to run threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    # Survives the exec. SIGKILL: a child that hangs must not outlive its supervisor either.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # It died before the line above.
        raise SystemExit(1)
    # Survives the exec as well: a service that starts writes no state yet, and must not die of being asked.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
