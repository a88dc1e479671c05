# TLT in a container: docker build --target cpu -t tlt:cpu . (or cuda). docs/containers.md says how to run it.
ARG PYTHON=3.11

# The wheel, built apart: the images below hold neither the source nor the build's tools.
FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY tlt ./tlt
COPY recipes ./recipes
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# What both images share. gcc: torch.compile and Triton compile on the machine.
FROM python:${PYTHON}-slim AS base
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 tlt \
    && install --directory --owner tlt /home/tlt/work
ARG EXTRAS=math,data

FROM base AS cpu
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu "$(ls /wheels/*.whl)[${EXTRAS}]"
USER 1000
WORKDIR /home/tlt/work
ENTRYPOINT ["tlt"]
CMD ["--help"]

# PyPI's torch for Linux brings CUDA's libraries; the driver is the host's.
FROM base AS cuda
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/*.whl)[${EXTRAS}]"
USER 1000
WORKDIR /home/tlt/work
ENTRYPOINT ["tlt"]
CMD ["--help"]
