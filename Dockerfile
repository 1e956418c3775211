# syntax=docker/dockerfile:1
# One file, eight images:
# docker build --target kvcache|kvcache-mooncake|worker|worker-ray|worker-gpu|worker-gpu-ray|gateway|vllm-connector .
# The worker's torch comes from the package index that pip is told of: for a small CPU image name one that holds CPU
# builds, with --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04
# For the labels of the images: the release, and the URL of the repository.
ARG VERSION=
ARG SOURCE=

# --- the wheel, the same in all images
FROM ${PYTHON_IMAGE} AS wheel
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt setuptools wheel grpcio-tools
COPY pyproject.toml setup.py README.md LICENSE ./
COPY protos protos
COPY kvcache_service kvcache_service
COPY fusion_worker fusion_worker
COPY kernels kernels
COPY gateway gateway
COPY vllm_connector vllm_connector
RUN pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels . \
    && python -m venv /opt/fusionkv

# --- packages: each image holds only what its service imports
FROM wheel AS kvcache-packages
RUN /opt/fusionkv/bin/pip install --no-cache-dir -c constraints.txt "$(echo /wheels/*.whl)[cache,object-store,prometheus]"

FROM kvcache-packages AS kvcache-mooncake-packages
RUN /opt/fusionkv/bin/pip install --no-cache-dir -c constraints.txt "$(echo /wheels/*.whl)[mooncake]"

FROM wheel AS gateway-packages
RUN /opt/fusionkv/bin/pip install --no-cache-dir -c constraints.txt "$(echo /wheels/*.whl)[gateway,http,milvus,prometheus]"

FROM wheel AS worker-packages
ARG PIP_EXTRA_INDEX_URL=
RUN /opt/fusionkv/bin/pip install --no-cache-dir "$(grep '^torch==' constraints.txt)" \
    && /opt/fusionkv/bin/pip install --no-cache-dir -c constraints.txt "$(echo /wheels/*.whl)[worker,prometheus]"

# --- what runs: no compiler, no pip cache, a user without rights, only /data and /tmp written
FROM ${PYTHON_IMAGE} AS runtime
ARG VERSION
ARG SOURCE
LABEL org.opencontainers.image.title="FusionKV" \
      org.opencontainers.image.description="The system of record for KV caches in retrieval-augmented generation" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.source="${SOURCE}"
ENV PATH=/opt/fusionkv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# As process 1, tini passes SIGTERM on to a service that doesn't listen for it yet, which ends it: the kernel wouldn't.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir /data && chown 10001:10001 /data
WORKDIR /data
STOPSIGNAL SIGTERM
USER 10001:10001

FROM runtime AS kvcache
COPY --from=kvcache-packages /opt/fusionkv /opt/fusionkv
ENV FUSIONKV_KVCACHE_LISTEN=[::]:7070 FUSIONKV_KVCACHE_DATA_DIR=/data
EXPOSE 7070
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
ENV FUSIONKV_KVCACHE_LISTEN=[::]:7070 FUSIONKV_KVCACHE_DATA_DIR=/data
EXPOSE 7070
ENTRYPOINT ["tini", "--", "python", "-P", "-m", "fusionkv.kvcache_service"]

FROM runtime AS gateway
COPY --from=gateway-packages /opt/fusionkv /opt/fusionkv
ENV FUSIONKV_GATEWAY_LISTEN=[::]:7072 FUSIONKV_GATEWAY_DATA_DIR=/data
EXPOSE 7072
ENTRYPOINT ["tini", "--", "python", "-P", "-m", "fusionkv.gateway"]

FROM runtime AS worker
COPY --from=worker-packages /opt/fusionkv /opt/fusionkv
ENV FUSIONKV_WORKER_LISTEN=[::]:7071 FUSIONKV_WORKER_MODEL=/models HF_HUB_OFFLINE=1
EXPOSE 7071
ENTRYPOINT ["tini", "--", "python", "-P", "-m", "fusionkv.fusion_worker"]

# For nodes of a Ray cluster that encoders run on: the extra `ray`, and what a head needs to be given jobs over HTTP.
FROM worker AS worker-ray
USER 0:0
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir -c /wheels/constraints.txt "ray[default]"
ENV RAY_USAGE_STATS_ENABLED=0
USER 10001:10001

# The CUDA image brings a Python of its own (3.12 on Ubuntu 24.04), so the packages are installed anew.
FROM ${CUDA_IMAGE} AS worker-gpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/fusionkv
ENV PATH=/opt/fusionkv/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 \
    TRITON_CACHE_DIR=/tmp/triton
COPY --from=wheel /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir "$(grep '^torch==' /wheels/constraints.txt)" \
    && pip install --no-cache-dir -c /wheels/constraints.txt "$(echo /wheels/*.whl)[worker,prometheus,gpu]" \
    && mkdir /data && chown 10001:10001 /data
ARG VERSION
ARG SOURCE
LABEL org.opencontainers.image.title="FusionKV worker for NVIDIA GPUs" \
      org.opencontainers.image.description="The system of record for KV caches in retrieval-augmented generation" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.source="${SOURCE}"
WORKDIR /data
ENV FUSIONKV_WORKER_LISTEN=[::]:7071 FUSIONKV_WORKER_MODEL=/models
EXPOSE 7071
STOPSIGNAL SIGTERM
USER 10001:10001
ENTRYPOINT ["tini", "--", "python", "-P", "-m", "fusionkv.fusion_worker"]

FROM worker-gpu AS worker-gpu-ray
USER 0:0
RUN pip install --no-cache-dir -c /wheels/constraints.txt "ray[default]"
ENV RAY_USAGE_STATS_ENABLED=0
USER 10001:10001

# --- the connector for vLLM's own image, which an init container lays beside it: what is in /connector goes to /mnt.
FROM wheel AS vllm-connector-packages
# Beside the wheel what vLLM's image lacks; and gRPC and protobuf, which it may have older than our stubs were generated
# for, and which run stubs of older versions too. They are compiled: PYTHON_IMAGE has to have vLLM's Python, 3.12.
RUN pip install --no-cache-dir --no-deps --target /connector -c constraints.txt \
    /wheels/*.whl grpcio grpcio-health-checking grpcio-reflection protobuf xxhash

FROM runtime AS vllm-connector
COPY --from=vllm-connector-packages /connector /connector
ENTRYPOINT ["cp", "-R", "/connector/.", "/mnt"]
