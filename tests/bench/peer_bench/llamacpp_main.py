"""llama.cpp's HTTP server, as the wheel ``xllamacpp`` has it. Runs in that peer's environment: imports nothing of ours.

python llamacpp_main.py MODEL.gguf PORT SLOTS CONTEXT THREADS
"""

from __future__ import annotations

import os
import signal
import sys

import xllamacpp


def main() -> None:
    path, port, slots, context, threads = sys.argv[1], *map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.port = port
    params.n_parallel = slots
    params.n_ctx = context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print("listening at", server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os._exit(0)  # its own end would wait for requests under way


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
