# vLLM for NVIDIA GPUs with the connector. Built from the root of the checkout:
#   docker build --file deploy/docker/gpu.Dockerfile --tag efficient-lmcache:0.1.0-gpu .
# For a base pinned by its digest: --build-arg BASE_IMAGE=python:3.11-slim-bookworm@sha256:...
ARG BASE_IMAGE=python:3.11.14-slim-bookworm
FROM ${BASE_IMAGE}

# vLLM compiles kernels when an engine starts.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

COPY deploy/docker/gpu-requirements.txt /src/requirements.txt
RUN pip install --no-cache-dir --no-deps --requirement /src/requirements.txt && vllm download-kernels

COPY pyproject.toml README.md LICENSE /src/
COPY efficient_lmcache /src/efficient_lmcache
RUN pip install --no-cache-dir --no-deps --no-build-isolation /src

RUN useradd --uid 10001 --create-home engine
USER 10001:10001
WORKDIR /home/engine
# Chunk keys hash tokens: every process that shares a tier must hash alike.
ENV PYTHONHASHSEED=0
EXPOSE 8000
ENTRYPOINT ["efficient-lmcache", "serve"]
