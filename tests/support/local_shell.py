"""A stand-in for ``ssh`` that runs the command in a shell on this machine: several hosts on one machine.

Takes ssh's command line: options, ``--``, the host, the command. A host that is called ``away`` is not there, nor are
those that are listed in the file that ``-F`` names, which can change at any time.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def hosts_away(options: list[str]) -> list[str]:
    listed = Path(options[options.index("-F") + 1]).read_text().split() if "-F" in options else []
    return ["away", *listed]


if __name__ == "__main__":
    split = sys.argv.index("--")
    host, command = sys.argv[split + 1 :]
    if host in hosts_away(sys.argv[:split]):
        print(f"ssh: connect to host {host} port 22: Connection timed out", file=sys.stderr)
        sys.exit(255)
    os.execvp("sh", ["sh", "-c", command])
