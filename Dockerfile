# syntax=docker/dockerfile:1
# One file, eight images:
# docker build --target kvcache|kvcache-mooncake|worker|worker-ray|worker-gpu|worker-gpu-ray|gateway|vllm-connector .
# requirements.lock has the hashes of the packages that they hold: of PyPI's files, and of PyTorch's for CPUs.
# --build-arg PIP_EXTRA_INDEX_URL names another index with the latter; for an index with builds of its own, run
# scripts/lock.py first.
# The digest decides what is pulled; `docker buildx imagetools inspect IMAGE:TAG` prints that of a newer build.
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c
# Without CUDA's runtime, which torch brings.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:f8ef28f579ea42a44b415d2c5d46f788e6a9b395c6c83f2929416e1fc192c143
# SOURCE_DATE_EPOCH, where packages are installed: bytecode is then checked by a hash of its source. Layers may round the
# times of files, by which half of it would be stale, and be compiled anew at each start (read-only, it can't be kept).
# Labels that each build changes come by `--label` (k8s/fusionkv/README.md): an argument would be part of the layers below.

# --- what the images install, a list in a file of its own: only a change of these installs packages anew
FROM ${PYTHON_IMAGE} AS requirements
WORKDIR /requirements
COPY requirements.lock ./
RUN awk -v RS= -F'\n' 'NR > 1 {n = split($1, lists, " "); for (i = 2; i <= n; i++) print > (lists[i] ".txt")}' \
    requirements.lock

# --- the package itself, the same in all images and the last layer of each
FROM ${PYTHON_IMAGE} AS application
ENV SOURCE_DATE_EPOCH=315532800
WORKDIR /src
COPY --from=requirements /requirements/build.txt ./
RUN --mount=type=cache,target=/root/.cache/pip pip install --require-hashes -r build.txt
COPY pyproject.toml setup.py README.md LICENSE ./
COPY protos protos
COPY kvcache_service kvcache_service
COPY fusion_worker fusion_worker
COPY kernels kernels
COPY gateway gateway
COPY vllm_connector vllm_connector
# Without pip, which no image needs.
RUN pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels . \
    && python -m venv --without-pip /opt/fusionkv \
    && pip --python /opt/fusionkv/bin/python install --no-cache-dir --no-deps --target /opt/fusionkv/app /wheels/*.whl

# --- packages: each image holds only what its service imports
FROM ${PYTHON_IMAGE} AS packages
ENV SOURCE_DATE_EPOCH=315532800
COPY --from=requirements /requirements /requirements
WORKDIR /requirements
# The package is found in a folder of its own.
RUN python -m venv --without-pip /opt/fusionkv \
    && echo /opt/fusionkv/app > "$(echo /opt/fusionkv/lib/python*/site-packages)/fusionkv.pth"

FROM packages AS kvcache-packages
RUN --mount=type=cache,target=/root/.cache/pip pip --python /opt/fusionkv/bin/python install \
    --require-hashes -r kvcache.txt

FROM kvcache-packages AS kvcache-mooncake-packages
RUN --mount=type=cache,target=/root/.cache/pip pip --python /opt/fusionkv/bin/python install \
    --require-hashes -r mooncake.txt

FROM packages AS gateway-packages
RUN --mount=type=cache,target=/root/.cache/pip pip --python /opt/fusionkv/bin/python install \
    --require-hashes -r gateway.txt

FROM packages AS worker-packages
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN --mount=type=cache,target=/root/.cache/pip pip --python /opt/fusionkv/bin/python install \
    --require-hashes -r worker.txt

# For nodes of a Ray cluster that encoders run on.
FROM worker-packages AS worker-ray-packages
RUN --mount=type=cache,target=/root/.cache/pip pip --python /opt/fusionkv/bin/python install \
    --require-hashes -r ray.txt

# Of the CUDA image's own Python (3.12 on Ubuntu 24.04).
FROM ${CUDA_IMAGE} AS worker-gpu-packages
ENV SOURCE_DATE_EPOCH=315532800
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-pip python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=requirements /requirements /requirements
WORKDIR /requirements
RUN python3 -m venv --without-pip /opt/fusionkv \
    && echo /opt/fusionkv/app > "$(echo /opt/fusionkv/lib/python*/site-packages)/fusionkv.pth"
RUN --mount=type=cache,target=/root/.cache/pip pip --python /opt/fusionkv/bin/python install \
    --require-hashes -r gpu.txt

FROM worker-gpu-packages AS worker-gpu-ray-packages
RUN --mount=type=cache,target=/root/.cache/pip pip --python /opt/fusionkv/bin/python install \
    --require-hashes -r ray.txt

# --- what runs: no compiler, no pip, a user without rights, only /data and /tmp written
FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="FusionKV" \
      org.opencontainers.image.description="The system of record for KV caches in retrieval-augmented generation" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/fusionkv/bin:/opt/fusionkv/app/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# As process 1, tini passes SIGTERM on to a service that doesn't listen for it yet, which ends it: the kernel wouldn't.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* /usr/local/bin/pip* /usr/local/lib/python*/site-packages/pip* \
        /usr/local/lib/python*/ensurepip \
    && mkdir /data && chown 10001:10001 /data
WORKDIR /data
STOPSIGNAL SIGTERM
USER 10001:10001

FROM runtime AS kvcache
COPY --from=kvcache-packages /opt/fusionkv /opt/fusionkv
COPY --from=application /opt/fusionkv/app /opt/fusionkv/app
ENV FUSIONKV_KVCACHE_LISTEN=[::]:7070 FUSIONKV_KVCACHE_DATA_PORT=7073 FUSIONKV_KVCACHE_DATA_DIR=/data
EXPOSE 7070 7073
ENTRYPOINT ["tini", "--", "python", "-P", "-m", "fusionkv.kvcache_service"]

# For services that share a Mooncake Store, and for its master: `mooncake_master` in place of the entry point.
FROM runtime AS kvcache-mooncake
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libcurl4 libibverbs1 libnuma1 librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
USER 10001:10001
COPY --from=kvcache-mooncake-packages /opt/fusionkv /opt/fusionkv
COPY --from=application /opt/fusionkv/app /opt/fusionkv/app
ENV FUSIONKV_KVCACHE_LISTEN=[::]:7070 FUSIONKV_KVCACHE_DATA_PORT=7073 FUSIONKV_KVCACHE_DATA_DIR=/data
EXPOSE 7070 7073
ENTRYPOINT ["tini", "--", "python", "-P", "-m", "fusionkv.kvcache_service"]

FROM runtime AS gateway
COPY --from=gateway-packages /opt/fusionkv /opt/fusionkv
COPY --from=application /opt/fusionkv/app /opt/fusionkv/app
ENV FUSIONKV_GATEWAY_LISTEN=[::]:7072 FUSIONKV_GATEWAY_DATA_DIR=/data
EXPOSE 7072
ENTRYPOINT ["tini", "--", "python", "-P", "-m", "fusionkv.gateway"]

FROM runtime AS worker-runtime
ENV FUSIONKV_WORKER_LISTEN=[::]:7071 FUSIONKV_WORKER_MODEL=/models HF_HUB_OFFLINE=1
EXPOSE 7071
ENTRYPOINT ["tini", "--", "python", "-P", "-m", "fusionkv.fusion_worker"]

FROM worker-runtime AS worker
COPY --from=worker-packages /opt/fusionkv /opt/fusionkv
COPY --from=application /opt/fusionkv/app /opt/fusionkv/app

FROM worker-runtime AS worker-ray
ENV RAY_USAGE_STATS_ENABLED=0
COPY --from=worker-ray-packages /opt/fusionkv /opt/fusionkv
COPY --from=application /opt/fusionkv/app /opt/fusionkv/app

# Triton compiles kernels at run time, with gcc.
FROM ${CUDA_IMAGE} AS worker-gpu-runtime
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev tini \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir /data && chown 10001:10001 /data
ENV PATH=/opt/fusionkv/bin:/opt/fusionkv/app/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 TRITON_CACHE_DIR=/tmp/triton
LABEL org.opencontainers.image.title="FusionKV worker for NVIDIA GPUs" \
      org.opencontainers.image.description="The system of record for KV caches in retrieval-augmented generation" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /data
ENV FUSIONKV_WORKER_LISTEN=[::]:7071 FUSIONKV_WORKER_MODEL=/models
EXPOSE 7071
STOPSIGNAL SIGTERM
USER 10001:10001
ENTRYPOINT ["tini", "--", "python", "-P", "-m", "fusionkv.fusion_worker"]

FROM worker-gpu-runtime AS worker-gpu
COPY --from=worker-gpu-packages /opt/fusionkv /opt/fusionkv
COPY --from=application /opt/fusionkv/app /opt/fusionkv/app

FROM worker-gpu-runtime AS worker-gpu-ray
ENV RAY_USAGE_STATS_ENABLED=0
COPY --from=worker-gpu-ray-packages /opt/fusionkv /opt/fusionkv
COPY --from=application /opt/fusionkv/app /opt/fusionkv/app

# --- the connector for vLLM's own image, which an init container lays beside it: what is in /connector goes to /mnt.
FROM packages AS vllm-connector-packages
# Its packages are compiled: PYTHON_IMAGE has to have vLLM's Python, 3.12.
RUN --mount=type=cache,target=/root/.cache/pip pip install --no-deps --target /connector \
    --require-hashes -r connector.txt

FROM runtime AS vllm-connector
COPY --from=vllm-connector-packages /connector /connector
COPY --from=application /opt/fusionkv/app /connector
ENTRYPOINT ["cp", "-R", "/connector/.", "/mnt"]
