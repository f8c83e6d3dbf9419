# syntax=docker/dockerfile:1.7
# Octavo on Ray, for `docker run` and as the image of every Ray pod:
#
#   docker build --target cpu  -t octavo:0.1.0-cpu .
#   docker build --target cuda -t octavo:0.1.0-cuda .
#
# Behind a mirror of the package index: --secret id=pip,src=$HOME/.config/pip/pip.conf

FROM python:3.12.12-slim-bookworm AS wheel
WORKDIR /source
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=cache,target=/root/.cache/pip \
    pip install "setuptools>=77" wheel
COPY pyproject.toml README.md LICENSE __init__.py ./
COPY cluster cluster
COPY router router
COPY worker worker
COPY kernels kernels
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .


# Debian's bash replaces itself by the last command of `bash -c`, so `ray start --block` gets SIGTERM where KubeRay runs it.
FROM python:3.12.12-slim-bookworm AS base
# The program belongs to root and the process does not run as root, so it cannot change itself.
RUN groupadd --gid 10001 octavo \
    && useradd --uid 10001 --gid octavo --create-home octavo \
    && install -d -o octavo -g octavo /var/cache/octavo \
    && python -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH \
    OCTAVO_CACHE_DIR=/var/cache/octavo \
    HF_HOME=/var/cache/octavo/huggingface \
    RAY_USAGE_STATS_ENABLED=0 \
    PYTHONUNBUFFERED=1
WORKDIR /home/octavo
EXPOSE 8000
# For docker; Kubernetes has its own probes. A first start fetches and converts a model.
HEALTHCHECK --start-period=15m --start-interval=5s --interval=15s --timeout=5s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# No ENTRYPOINT: KubeRay gives the command. `docker stop --time 60`, since streams are finished first.
CMD ["octavo", "serve", "--host", "0.0.0.0", "--port", "8000"]


FROM base AS cuda
# Triton compiles a launcher for each kernel with gcc; NCCL finds InfiniBand by libibverbs. CUDA itself comes with PyTorch,
# and the driver from the node.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev ibverbs-providers libibverbs1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN --mount=type=bind,source=constraints.txt,target=/mnt/constraints.txt \
    --mount=type=bind,from=wheel,source=/wheels,target=/mnt/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint /mnt/constraints.txt torch==2.13.0 /mnt/wheels/*.whl
USER 10001:10001


FROM base AS cpu
# The CPU build of PyTorch is a twentieth of the size.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,source=constraints.txt,target=/mnt/constraints.txt \
    --mount=type=bind,from=wheel,source=/wheels,target=/mnt/wheels \
    --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint /mnt/constraints.txt --extra-index-url "$TORCH_INDEX" torch==2.13.0+cpu /mnt/wheels/*.whl
USER 10001:10001
