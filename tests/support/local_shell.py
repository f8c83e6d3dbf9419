"""A stand-in for ``ssh`` that runs the command in a shell on this machine: several hosts on one machine.

Takes ssh's command line: options, ``--``, the host, the command. A host that is called ``away`` is not there.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    host, command = sys.argv[sys.argv.index("--") + 1 :]
    if host == "away":
        print(f"ssh: connect to host {host} port 22: Connection timed out", file=sys.stderr)
        sys.exit(255)
    os.execvp("sh", ["sh", "-c", command])
