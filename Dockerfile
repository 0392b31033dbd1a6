# syntax=docker/dockerfile:1
# Image that serves a model: docker build -t urank:local .  See docs/deploy.md.

# The Python version used in the tests. Pin it by digest for reproducible builds.
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/urank
WORKDIR /source
# Serving needs no torch, so the dependencies are those of a list of their own; this layer stays cached until it changes.
COPY constraints.txt deploy/requirements.txt ./
RUN /opt/urank/bin/pip install --constraint constraints.txt --requirement requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN /opt/urank/bin/pip install --no-deps .

FROM python:${PYTHON}
# LightGBM needs libgomp, which slim images lack; each Debian release has a single version of it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --system --gid 10001 urank \
    && useradd --system --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin urank \
    && install --directory --owner=urank --group=urank --mode=0700 /feedback \
    && install --directory /model
COPY --from=build /opt/urank /opt/urank
# Only /feedback and /tmp are written to, so the root file system can be read-only.
ENV PATH=/opt/urank/bin:$PATH \
    HOME=/tmp \
    OMP_NUM_THREADS=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
STOPSIGNAL SIGTERM
# Bypass proxies: an http_proxy in the environment must not apply to the health check.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s --retries=3 CMD ["python", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/healthz', timeout=2)"]
ENTRYPOINT ["urank"]
CMD ["serve", "/model/current", "--host", "0.0.0.0", "--port", "8000", "--log", "/feedback", "--key-file", "/run/secrets/urank_key"]
