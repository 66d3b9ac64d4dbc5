# CPU:   docker build --target cpu -t shortformer .
# CUDA:  docker build --target cuda --build-arg TORCH_INDEX=URL -t shortformer:cuda .    (not yet tried on a GPU)
#        URL is the index for your CUDA version, as https://pytorch.org/get-started says.
# Run:   docker run --rm -it -v "$PWD/runs:/shortformer/runs" shortformer ./launch/quickstart.sh
FROM python:3.11-slim AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /shortformer
COPY . .

FROM base AS cuda
ARG TORCH_INDEX
RUN python3 -m venv .venv && .venv/bin/pip install --no-cache-dir torch==2.13.0 --index-url "$TORCH_INDEX"
RUN bash -c 'source launch/environment.sh && install_requirements requirements.txt'
ENV PATH="/shortformer/.venv/bin:$PATH"

FROM base AS cpu
RUN bash -c 'source launch/environment.sh && install_requirements requirements.txt'
ENV PATH="/shortformer/.venv/bin:$PATH" DS_ACCELERATOR=cpu
