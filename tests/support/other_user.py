"""Opens sockets and files as somebody else: a process that starts as root and gives that up first. Needs root."""

import subprocess
import sys

NOBODY = 65534
_PROGRAM = """
import os, socket, sys
kind, path, user, groups = sys.argv[1], sys.argv[2], int(sys.argv[3]), [int(group) for group in sys.argv[4:]]
os.setgroups(groups)
os.setgid(user)
os.setuid(user)
try:
    if kind == "socket":
        socket.socket(socket.AF_UNIX).connect(path)
    else:
        os.close(os.open(path, os.O_RDWR))
    print("opened")
except OSError as error:
    print(error.strerror)
"""


def opened_by(path: object, *groups: int, socket: bool = False, user: int = NOBODY) -> str:
    """ "opened", or why a user of these further groups cannot open the file for writing, or connect to the socket."""
    kind = "socket" if socket else "file"
    command = [sys.executable, "-I", "-S", "-c", _PROGRAM, kind, str(path), str(user), *map(str, groups)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
