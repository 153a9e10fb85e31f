# The image that heads and nodes run: `docker run IMAGE node`. Built for CPUs, or for GPUs with --build-arg CUDA=cu130
# (after infra/image/lock.py cu130). Without a registry to take the base from: infra/image/build-offline.sh.
# BASE may name a digest (python@sha256:...), so that two builds stand on the same bytes.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG CUDA=cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/${CUDA}
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all:
RUN python3 -m venv /opt/idletrain
WORKDIR /src
# What the code needs changes less often than the code: a layer of its own, without the fifth that is there for tests.
# Every file is the one whose hash was written down, whichever index it comes from.
COPY infra/image/requirements-${CUDA}.txt requirements.txt
RUN /opt/idletrain/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        --require-hashes -r requirements.txt \
    && cd /opt/idletrain/lib/python3*/site-packages \
    && rm -rf torch/include torch/test torch/bin/protoc* torch/bin/test_* \
    && find . -type d -name tests -prune -exec rm -rf {} +
COPY pyproject.toml README.md LICENSE ./
COPY examples examples
COPY infra infra
COPY workflows workflows
COPY idletrain idletrain
RUN /opt/idletrain/bin/pip install --no-deps --no-build-isolation . \
    && /opt/idletrain/bin/pip uninstall --yes pip

FROM ${BASE}
RUN useradd --uid 10001 --user-group --create-home idletrain
COPY --from=build /opt/idletrain /opt/idletrain
# Freed gradients go back to the machine, as in every worker (idletrain/cluster/local.py, which also gives the workers of
# a node one thread each; a head evaluates with all). The bytecode is in the image: nothing is written beside it.
ENV PATH=/opt/idletrain/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=8388608
USER 10001:10001
WORKDIR /home/idletrain
ENTRYPOINT ["idletrain"]
