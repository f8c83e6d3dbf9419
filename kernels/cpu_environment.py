"""The environment of a worker process that computes on CPUs. Imports nothing: it is needed before torch is."""

from __future__ import annotations


def cpu_environment(num_threads: int) -> dict[str, str]:
    """The environment variables that a worker process must be *started* with to compute on ``num_threads`` threads.

    Two traps are avoided, each of which turns an operation of 0.3 ms into one of 8 or 16 (time slices of the kernel):

    * Two pools of threads, torch's and numba's, that wait for each other's processors. numba's ``omp`` layer runs in
      the pool that torch started (one libgomp, loaded by torch, which must be imported first).
    * A thread that spins at the end of a parallel region while the one it waits for has no processor, because another
      process has it. ``passive`` lets waiting threads sleep. 30 layers of SmolLM2-135M at 16 sequences on two cores
      which other processes used as well: 95 ms, against 1,170 ms with the default and 1,780 ms with numba's own
      ``workqueue`` layer. On an idle machine it would cost 10 to 25 µs a region, which a spin of at most 0.3 ms saves;
      beside one or two other busy processes it makes no clear difference. libgomp spins only in a process that has no
      more threads in its pools than it may use: each thread that opens parallel regions, and lives, has its own pool.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "NUMBA_NUM_THREADS": str(num_threads),
        "NUMBA_THREADING_LAYER": "omp",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "5000",
    }
