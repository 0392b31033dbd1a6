# syntax=docker/dockerfile:1
# An image that serves a model: docker build -t urank:local .  See docs/deploy.md.

# The Python that the tests run on. Pin it by digest where builds must be the same to the byte.
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
# On x86-64, PyPI's torch brings CUDA along. Name PyTorch's index of CPU builds here, and pip takes those instead.
ARG PIP_EXTRA_INDEX_URL
RUN python -m venv /opt/urank
WORKDIR /source
# What urank needs comes first, with an empty package in its place: these layers last until a version changes.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN mkdir -p src/urank \
    && touch src/urank/__init__.py \
    && /opt/urank/bin/pip install --constraint constraints.txt .
COPY src ./src
RUN /opt/urank/bin/pip install --no-deps --force-reinstall .

FROM python:${PYTHON}
# LightGBM needs libgomp, which slim images leave out; Debian keeps one version of it per release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --system --gid 10001 urank \
    && useradd --system --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin urank \
    && install --directory --owner=urank --group=urank --mode=0700 /feedback \
    && install --directory /model
COPY --from=build /opt/urank /opt/urank
# Nothing is written but to /feedback and /tmp, so that the root can be read-only.
ENV PATH=/opt/urank/bin:$PATH \
    HOME=/tmp \
    OMP_NUM_THREADS=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
# Without proxies: an http_proxy in the environment is not meant for this.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/healthz', timeout=2)"]
ENTRYPOINT ["urank"]
CMD ["serve", "/model/current", "--host", "0.0.0.0", "--port", "8000", "--log", "/feedback", "--key-file", "/run/secrets/urank_key"]
