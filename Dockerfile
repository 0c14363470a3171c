# syntax=docker/dockerfile:1
# Two images. `slim`: orchestrator and commands, without torch. `model`: target and draft. Built by `make images`; docs/kubernetes.md, Images.
# tests/images runs every step below without a container engine, and fails for a step that it does not know.

# The Python that requirements.lock is tested with. PYTHON_DIGEST pins what the tag means today, as "@sha256:…": docs/kubernetes.md says how
# to look it up. It is empty here because a digest belongs to whoever has verified it.
ARG PYTHON_IMAGE=docker.io/library/python:3.11.14-slim-bookworm
ARG PYTHON_DIGEST=""

FROM ${PYTHON_IMAGE}${PYTHON_DIGEST} AS python
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1


# ---- specdec itself: a wheel from the sources, installed, its kernels compiled beside it
FROM python AS own
# The compiler stays here. Any version of it that this Debian has will do: what it makes is checked at each start (SPECDEC_SELF_TEST).
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements.lock ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /build && \
    python -m pip --python /build/bin/python install -c requirements.lock setuptools
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY tools/build_kernels.py tools/
COPY specdec/ specdec/
COPY orchestrator/ orchestrator/
COPY target_service/ target_service/
COPY draft_service/ draft_service/
RUN python -m pip --python /build/bin/python wheel --no-deps --no-build-isolation --wheel-dir /dist . && \
    python -m venv --without-pip /opt/specdec && \
    python -m pip --python /opt/specdec/bin/python install --no-deps --no-index /dist/specdec-*.whl && \
    /opt/specdec/bin/python tools/build_kernels.py --installed --required


# ---- the packages of each image: a layer that our own changes leave as it is
FROM python AS slim-packages
WORKDIR /src
COPY pyproject.toml requirements.lock ./
COPY tools/image_requirements.py tools/
RUN --mount=type=cache,target=/root/.cache/pip \
    python tools/image_requirements.py > needed.txt && \
    python -m venv --without-pip /opt/specdec && \
    python -m pip --python /opt/specdec/bin/python install -c requirements.lock -r needed.txt

FROM python AS model-packages
# Where torch comes from. The default has no CUDA. Empty = the registry's own build, which on Linux brings CUDA with it.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml requirements.lock ./
COPY tools/image_requirements.py tools/
RUN --mount=type=cache,target=/root/.cache/pip \
    python tools/image_requirements.py model > needed.txt && \
    python -m venv --without-pip /opt/specdec && \
    python -m pip --python /opt/specdec/bin/python install --no-deps -c requirements.lock ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} torch && \
    python -m pip --python /opt/specdec/bin/python install -c requirements.lock -r needed.txt


# ---- what runs: read-only root, no shell, any user id; /tmp alone is written to
FROM python AS runtime
# HOME and USER, since the user id has no entry in /etc/passwd. SAFEPATH: no module is taken from the folder that a process starts in.
ENV PATH=/opt/specdec/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    USER=specdec \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    SPECDEC_HOST=0.0.0.0 \
    SPECDEC_METRICS_PORT=9464 \
    SPECDEC_HEALTH_PORT=50050
WORKDIR /
EXPOSE 9464 50050
ARG VERSION=0.1.0
ARG REVISION=""
ARG CREATED=""
ARG SOURCE=""
ARG PYTHON_IMAGE
LABEL org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.vendor="specdec"
STOPSIGNAL SIGTERM
USER 10001:10001
ENTRYPOINT ["/opt/specdec/bin/python", "-m"]

FROM runtime AS slim
COPY --from=slim-packages /opt/specdec /opt/specdec
COPY --from=own /opt/specdec /opt/specdec
LABEL org.opencontainers.image.title="specdec-slim" \
      org.opencontainers.image.description="Orchestrator and commands of specdec, without torch"
ENV SPECDEC_PORT=50051
EXPOSE 50051
CMD ["orchestrator"]

FROM runtime AS model
COPY --from=model-packages /opt/specdec /opt/specdec
COPY --from=own /opt/specdec /opt/specdec
LABEL org.opencontainers.image.title="specdec-model" \
      org.opencontainers.image.description="Target and draft of specdec"
# For the NVIDIA container runtime, where there is one.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    SPECDEC_PORT=50052
EXPOSE 50052 50053
CMD ["target_service"]
